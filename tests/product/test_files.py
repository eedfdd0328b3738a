"""Files and directories written whole or not at all, for those whom the umask lets read them."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import kvfold
from commands import refused
from kvfold.api import save
from kvfold.utils.files import new_directory, write_text
from models import tiny


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


class Tokenizer:
    """One that writes a folder, and a file for its owner alone."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "vocabulary" / "more").mkdir(parents=True)
        (folder / "vocabulary" / "more" / "words.txt").touch(mode=0o600)


def test_a_checkpoint_has_the_modes_that_the_umask_says(tmp_path, umask) -> None:
    path = tmp_path / "out"
    save(tiny("llama-gqa"), Tokenizer(), path)
    files = [x for x in path.rglob("*") if x.is_file()]
    folders = [x for x in path.rglob("*") if x.is_dir()]
    assert {"model.safetensors", "config.json", "words.txt"} < {x.name for x in files}
    assert {mode(x) for x in files} == {0o666 & ~umask}
    assert {mode(x) for x in [path, *folders]} == {0o777 & ~umask} and len(folders) == 2


def test_a_text_has_the_mode_that_the_umask_says(tmp_path, umask) -> None:
    write_text(tmp_path / "a.json", "1")
    write_text(tmp_path / "a.json", "2")
    assert mode(tmp_path / "a.json") == 0o666 & ~umask
    assert [x.name for x in tmp_path.iterdir()] == ["a.json"]


KILLED = """
import os, sys
from pathlib import Path
from kvfold.utils.files import new_directory
with new_directory(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("")
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_swept_and_blocks_nobody(tmp_path) -> None:
    path = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -9
    assert not path.exists() and list(tmp_path.rglob("half"))
    with new_directory(path) as folder:
        (folder / "whole").write_text("")
    assert [x.name for x in tmp_path.iterdir()] == ["out"]
    assert [x.name for x in path.iterdir()] == ["whole"]


def test_neighbours_of_an_output_are_left_alone(tmp_path) -> None:
    for name in (".out-archived", ".out.old", "out-2"):
        (tmp_path / name).mkdir()
    with new_directory(tmp_path / "out"), new_directory(tmp_path / "out-2"):
        pass
    assert {x.name for x in tmp_path.iterdir()} == {".out-archived", ".out.old", "out", "out-2"}


def test_the_second_writer_is_refused_before_its_work(tmp_path) -> None:
    path = tmp_path / "out"
    with new_directory(path) as folder:
        with pytest.raises(ValueError, match=f"{path} is being written by another process"):
            kvfold.compress("no/such/model", output=path, fold=True)
        (folder / "whole").write_text("")
    assert [x.name for x in tmp_path.rglob("*")] == ["out", "whole"]


def test_an_output_in_use_is_refused_before_the_work(tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        kvfold.compress("no/such/model", output=tmp_path, fold=True)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_writer_that_waits_finds_what_the_first_one_wrote(tmp_path) -> None:
    path, said = tmp_path / "out", []

    def second() -> None:
        try:
            with new_directory(path, wait=True):
                said.append("wrote")
        except ValueError as error:
            said.append(str(error))

    with new_directory(path) as folder:
        thread = threading.Thread(target=second)
        thread.start()
        (folder / "whole").write_text("")
    thread.join(20)
    assert len(said) == 1 and "is not an empty directory" in said[0]
    assert [x.name for x in tmp_path.rglob("*")] == ["out", "whole"]


def test_an_empty_directory_and_a_link_to_one_are_filled(tmp_path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_directory(tmp_path / "link") as folder:
        (folder / "whole").write_text("")
    assert (tmp_path / "real" / "whole").exists() and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["loop", "loop/new"])
def test_a_link_to_itself_is_refused(name, tmp_path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = tmp_path / name
    with pytest.raises(ValueError, match="is a link that leads back to itself"):
        write_text(path, "one")
    with pytest.raises(ValueError, match="is a link that leads back to itself"):
        kvfold.compress("no/such/model", output=path)
    assert [x.name for x in tmp_path.iterdir()] == ["loop"] and (tmp_path / "loop").is_symlink()


@pytest.mark.parametrize("name", ["hard.txt", "soft.txt", "folder/../text.txt", "linked/text.txt"])
def test_an_output_is_an_input_by_whatever_name(name, tmp_path, capsys) -> None:
    (tmp_path / "folder").mkdir()
    text = tmp_path / "text.txt"
    text.write_text("The ship went out to sea. " * 60)
    os.link(text, tmp_path / "hard.txt")
    (tmp_path / "soft.txt").symlink_to("text.txt")
    (tmp_path / "linked").symlink_to(tmp_path)
    before = text.read_text()
    words = {"eval": ("--text", "--json"), "pack": ("--context", "--output")}
    for command, (read, written) in words.items():
        said = refused(capsys, command, "reference:gqa", read, text, written, tmp_path / name)
        assert f"{written} would replace" in said
    assert text.read_text() == before and (tmp_path / "soft.txt").is_symlink()


def test_a_link_to_another_file_system_is_written_there(tmp_path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir=other) as folder:
        (tmp_path / "out").symlink_to(Path(folder) / "out")
        write_text(tmp_path / "out", "one")
        assert (Path(folder) / "out").read_text() == "one" and (tmp_path / "out").is_symlink()
        with new_directory(Path(folder) / "made") as made:
            (made / "whole").touch()
        assert {x.name for x in Path(folder).iterdir()} == {"out", "made"}


def test_a_link_stays_one_and_what_is_no_file_is_refused(tmp_path) -> None:
    kept, link, pipe = (tmp_path / name for name in ("kept", "link", "pipe"))
    link.symlink_to(kept)
    write_text(link, "one")
    assert link.is_symlink() and kept.read_text() == "one"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="is a device or a pipe"):
        write_text(pipe, "one")
    assert pipe.is_fifo()
