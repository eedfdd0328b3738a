"""A stopped calibration goes on, with the same result, from a file that is never half of one."""

import shutil
from types import SimpleNamespace

import pytest
import torch

import kvfold
from cli_cases import plain  # noqa: F401  (a fixture: a random Llama as a checkpoint)
from kvfold.calibration import saved_pass
from kvfold.calibration.calibrate import calibrate
from kvfold.calibration.saved_pass import SavedPass, saved_beside
from kvfold.calibration.statistics import QUANTITIES, Statistics
from kvfold.calibration.statistics.record import Recorder
from kvfold.cli.main import main
from kvfold.models.families import family_of
from models import tiny, tokens

pytestmark = pytest.mark.usefixtures("still")

WINDOWS = tokens(5, 32)
RUN = Recorder.run


@pytest.fixture
def often(monkeypatch):
    """Every window is saved."""
    monkeypatch.setattr(saved_pass, "EVERY", 0.0)
    monkeypatch.setattr(saved_pass, "SHARE", 0)


def stop_at(monkeypatch, count: int) -> list[int]:
    """An interrupt in the window of that number; the windows that ran."""
    ran: list[int] = []

    def run(self, *args, **kwargs):
        ran.append(len(ran))
        if len(ran) == count:
            RUN(self, *args, **kwargs)  # what is half done does not count
            raise KeyboardInterrupt
        RUN(self, *args, **kwargs)

    monkeypatch.setattr(Recorder, "run", run)
    return ran


def measured(saved: SavedPass | None = None, **changed) -> Statistics:
    model = changed.pop("model", None) or tiny("llama-gqa")
    settings = {"windows": WINDOWS, "needs": set(QUANTITIES), "seed": 3, "text": "a name"} | changed
    topics = torch.arange(len(settings["windows"])) // 2
    return calibrate(model, family_of(model.config), topics=topics, saved=saved, **settings)


def assert_equal(a: Statistics, b: Statistics) -> None:
    assert a.key == b.key and a.layers.keys() == b.layers.keys()
    for layer, stored in a.layers.items():
        assert stored.keys() == b.layers[layer].keys() == set(QUANTITIES)
        for name, moment in stored.items():
            for part in ("second", "first", "weight"):
                same = torch.equal(getattr(moment, part), getattr(b.layers[layer][name], part))
                assert same, (layer, name, part)


def stopped(path, monkeypatch, at: int = 3) -> SavedPass:
    """The file of a pass that was stopped in the window of number `at`."""
    stop_at(monkeypatch, at)
    with pytest.raises(KeyboardInterrupt):
        measured(SavedPass(path))
    assert path.exists()
    monkeypatch.setattr(Recorder, "run", RUN)
    return SavedPass(path)


def test_a_stopped_pass_goes_on_with_the_same_numbers(tmp_path, monkeypatch, often) -> None:
    whole, said = measured(), []
    saved = stopped(tmp_path / "pass", monkeypatch)
    saved.say = said.append
    ran, reports = stop_at(monkeypatch, 0), []
    found = measured(saved, progress=lambda *report: reports.append(report))
    assert len(ran) == len(WINDOWS) - 2
    assert reports == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert said == [f"calibration goes on after 2 of 5 windows, from {saved.path}"]
    assert_equal(found, whole)
    again = stop_at(monkeypatch, 0)
    assert_equal(measured(SavedPass(saved.path)), whole)  # a finished one has nothing left to run
    assert not again


def torn(path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def other_file(path) -> None:
    torch.save({"about": "{}"}, path)


def evil(path) -> None:
    torch.save({"about": SimpleNamespace()}, path)


@pytest.mark.parametrize("spoil", [torn, flipped, other_file, evil, lambda path: path.unlink()])
def test_a_damaged_file_is_ignored(tmp_path, monkeypatch, often, spoil) -> None:
    saved = stopped(tmp_path / "pass", monkeypatch)
    spoil(saved.path)
    ran = stop_at(monkeypatch, 0)
    assert_equal(measured(saved), measured())
    assert len(ran) == 2 * len(WINDOWS)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "llama3-scaling"},
        {"windows": tokens(5, 32, seed=9)},
        {"needs": {"key_pre", "value"}},
        {"seed": 4},
        {"centroids": 2},
        {"dtype": torch.float64},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_file_of_another_pass_is_ignored(tmp_path, monkeypatch, often, changed) -> None:
    saved = stopped(tmp_path / "pass", monkeypatch)
    dtype = changed.get("dtype", torch.float32)
    model = tiny(changed.get("model", "llama-gqa")).to(dtype)
    settings = {name: x for name, x in changed.items() if name not in ("model", "dtype")}
    ran = stop_at(monkeypatch, 0)
    measured(saved, model=model, **settings)
    assert len(ran) == len(WINDOWS)


def test_it_is_saved_after_ten_seconds_and_seldom_where_that_takes_long(tmp_path) -> None:
    now, saves = [0.0], []

    def state():
        saves.append(now[0])
        now[0] += 2.0  # what saving takes
        return saved_pass.State(done=1, totals=[], generator=torch.zeros(1), place=0.0)

    saved = SavedPass(tmp_path / "pass", clock=lambda: now[0])
    saved.begin({}, 4)
    for second in (5, 11, 30, 52, 54, 95):
        now[0] = max(now[0], float(second))
        saved.keep({}, 4, state)
    assert saves == [11, 54]  # 20 times as long after it was written, and 10 seconds at least


def test_a_disk_that_fills_does_not_end_the_pass(tmp_path, monkeypatch, often, caplog) -> None:
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert_equal(measured(SavedPass(tmp_path / "pass")), measured())
    assert caplog.text.count("calibration cannot be saved in") == 1
    assert not list(tmp_path.iterdir())


COMMAND = ["--calib-tokens", "1024", "--fold", "--set", "no-check", "--output"]


def test_the_command_goes_on_and_leaves_nothing(plain, tmp_path, monkeypatch, capsys, often):
    output, other = tmp_path / "out", tmp_path / "other"
    command = ["compress", str(plain), *COMMAND]
    stop_at(monkeypatch, 3)
    assert main([*command, str(output)]) == 130
    path = saved_beside(output).path
    (tmp_path / f".{path.name}-1234").touch()  # as a killed process leaves one
    err = capsys.readouterr().err.splitlines()
    assert err[0] == f"loading {plain}"
    assert err[1].startswith("calibrating on 1024 tokens: about ") and "--calib-tokens" in err[1]
    said = f"calibration is saved in {path}: the same command goes on from there"
    assert err[-2:] == [said, "kvfold: interrupted"]
    assert {x.name for x in tmp_path.iterdir()} == {path.name, f".{path.name}-1234"}
    ran = stop_at(monkeypatch, 0)
    assert main([*command, str(output)]) == 0
    assert len(ran) == 1024 // 128 - 2 and "calibration goes on after 2 of 8 windows" in (
        capsys.readouterr().err
    )
    assert [x.name for x in tmp_path.iterdir()] == ["out"]
    assert main([*command, str(other)]) == 0
    assert (other / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


@pytest.mark.parametrize("fold", [True, False])
def test_a_full_disk_is_refused_before_calibration(plain, tmp_path, monkeypatch, fold) -> None:
    ran = stop_at(monkeypatch, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1.2e6))
    with pytest.raises(ValueError, match=r"takes up to \d MB, and the disk of .* has 1 MB free"):
        kvfold.compress(str(plain), fold=fold, output=tmp_path / "out", max_tokens=1024)
    assert not ran and not list(tmp_path.iterdir())
