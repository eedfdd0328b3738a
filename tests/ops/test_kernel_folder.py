"""Where compiled kernels are kept."""

import os

import pytest

from kvfold.ops.common.compile_ahead import TRITON_FOLDER, keeping_kernels

knobs = pytest.importorskip("triton.knobs")


@pytest.mark.parametrize("before", [None, "vllms"])
@pytest.mark.parametrize("folder", [None, "ours"])
def test_kernels_are_kept_in_this_folder_for_a_while(folder, before, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TRITON_FOLDER, raising=False)
    tritons = knobs.cache.dir
    if before is not None:
        monkeypatch.setenv(TRITON_FOLDER, before)
    with pytest.raises(KeyError), keeping_kernels(folder):
        assert knobs.cache.dir == (folder or tritons)
        raise KeyError
    assert os.environ.get(TRITON_FOLDER) == before


def test_a_folder_that_cannot_be_made_is_not_used(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(TRITON_FOLDER, "vllms")
    with keeping_kernels(str(tmp_path / "file" / "kernels")):
        assert knobs.cache.dir == "vllms"
