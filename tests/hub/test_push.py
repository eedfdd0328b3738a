"""Maps on the hub: published in one commit or not at all, and read back by their name.

The hub is a stand-in on this machine.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import kvfold
from commands import refused
from hub_server import Hub, hub_server
from kvfold.cli.main import main
from kvfold.hub import download as client
from kvfold.maps.sidecar import (
    CARD,
    FILES,
    PLAN,
    TENSORS,
    Sidecar,
)
from kvfold.utils.errors import SettingError
from model_types import tiny
from sidecar_cases import bytes_tokenizer

NAME = "someone/small-cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Maps of a tiny model, which lies beside them."""
    here = tmp_path_factory.mktemp("maps")
    model, tokenizer = tiny("llama"), bytes_tokenizer(here)
    model.save_pretrained(here / "model")
    tokenizer.save_pretrained(here / "model")
    made = kvfold.compress(model, keep=0.5, align=1, tokenizer=tokenizer, max_tokens=1024)
    made.save(here / "maps")
    return here / "maps"


@pytest.fixture(scope="module")
def other(folder) -> Path:
    """Other maps of the same model."""
    sidecar = Sidecar.load(folder)
    maps = {name: replace(x, key_up=2 * x.key_up) for name, x in sidecar.maps.items()}
    replace(sidecar, maps=maps).save(folder.parent / "other")
    return folder.parent / "other"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that this process publishes to, and reads from, with a right token."""
    with hub_server() as found:
        template = found.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", found.token)
        yield found


def files(hub: Hub, branch: str = "main", name: str = NAME) -> dict[str, bytes]:
    """What a branch has, without what every new repository has."""
    repository = hub.repositories[name]
    found = repository.commits[repository.branches[branch]]
    return {path: data for path, data in found.items() if path != ".gitattributes"}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path in FILES}


def same(a: Sidecar, b: Sidecar) -> bool:
    return {x: m.digest() for x, m in a.maps.items()} == {x: m.digest() for x, m in b.maps.items()}


def test_all_files_come_in_one_commit(hub: Hub, folder: Path, capsys) -> None:
    assert main(["push", str(folder), NAME]) == 0
    assert files(hub) == on_disk(folder)
    assert len(hub.repositories[NAME].commits) == 2  # the first is of the repository itself
    assert not hub.repositories[NAME].private
    said = capsys.readouterr().out
    assert f"{hub.address}/{NAME}/commit/" in said and f"--maps {NAME}" in said


def test_read_back_by_name(hub: Hub, folder: Path) -> None:
    main(["push", str(folder), NAME])
    assert same(Sidecar.load(NAME), Sidecar.load(folder))
    model, ids = tiny("llama"), torch.randint(3, 127, (1, 20))
    take_away = kvfold.attach(model, folder)
    with torch.no_grad():
        wanted = model(ids).logits
        take_away()
        kvfold.attach(model, NAME)
        assert torch.equal(model(ids).logits, wanted)
    llm = kvfold.LLM(str(folder.parent / "model"), maps=NAME, max_tokens=32, max_sequences=1)
    assert llm.runner.pool.layout.spec.kept_fraction == pytest.approx(0.5, abs=0.02)


def test_a_branch(hub: Hub, folder: Path, other: Path) -> None:
    main(["push", str(folder), NAME])
    before = files(hub)
    assert main(["push", str(other), NAME, "--revision", "doubled"]) == 0
    assert files(hub) == before
    assert same(Sidecar.load(f"{NAME}@doubled"), Sidecar.load(other))
    assert same(Sidecar.load(NAME), Sidecar.load(folder))
    commit = hub.repositories[NAME].branches["doubled"]
    assert same(Sidecar.load(f"{NAME}@{commit}"), Sidecar.load(other))
    with pytest.raises(SettingError, match="no revision 'absent'"):
        Sidecar.load(f"{NAME}@absent")


def test_private(hub: Hub, folder: Path, capsys) -> None:
    assert main(["push", str(folder), "me/hidden", "--private"]) == 0
    assert hub.repositories["me/hidden"].private
    main(["push", str(folder), NAME])
    before = files(hub)
    assert "exists and is public" in refused(capsys, "push", folder, NAME, "--private")
    assert files(hub) == before


@pytest.mark.parametrize("at", ["validate-yaml", "preupload", "/upload/", "/commit/"])
def test_a_connection_that_breaks_publishes_nothing(
    hub: Hub, folder: Path, other: Path, at: str, capsys, monkeypatch
) -> None:
    main(["push", str(folder), NAME])
    before, commits = files(hub), len(hub.repositories[NAME].commits)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    hub.breaks = at
    said = refused(capsys, "push", other, NAME)
    assert f"cannot publish {NAME}: the connection to the hub failed" in said
    assert said.endswith("nothing is half-published, try again")
    hub.breaks = None
    assert files(hub) == before and len(hub.repositories[NAME].commits) == commits
    assert same(Sidecar.load(NAME), Sidecar.load(folder))
    assert main(["push", str(other), NAME]) == 0
    assert same(Sidecar.load(NAME), Sidecar.load(other))


def test_a_wrong_token_and_no_rights(hub: Hub, folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "log in with `hf auth login`" in refused(capsys, "push", folder, NAME)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.refuses = {"preupload": 403}
    assert "your token may not do that there" in refused(capsys, "push", folder, NAME)
    assert not files(hub)


def test_nobody_is_logged_in(hub: Hub, folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(client, "get_token", lambda: None)
    assert "run `hf auth login`, or set HF_TOKEN" in refused(capsys, "push", folder, NAME)
    assert hub.requests == ["HEAD /"]


def test_a_damaged_folder_is_not_published(hub: Hub, folder: Path, capsys, tmp_path) -> None:
    for path, data in on_disk(folder).items():
        (tmp_path / path).write_bytes(data[: len(data) // 2] if path == TENSORS else data)
    assert "is damaged" in refused(capsys, "push", tmp_path, NAME)
    (tmp_path / PLAN).unlink()
    assert f"has no {PLAN}" in refused(capsys, "push", tmp_path, NAME)
    assert not hub.repositories


def test_a_card_is_made_where_there_is_none(hub: Hub, folder: Path, tmp_path) -> None:
    for path, data in on_disk(folder).items():
        if path != CARD:
            (tmp_path / path).write_bytes(data)
    assert main(["push", str(tmp_path), NAME]) == 0
    assert files(hub)[CARD] == (folder / CARD).read_bytes()


def test_what_was_read_once_is_there_without_a_network(hub: Hub, folder: Path, monkeypatch) -> None:
    main(["push", str(folder), NAME])
    Sidecar.load(NAME)
    monkeypatch.setattr(client, "_answers", lambda _: False)
    assert same(Sidecar.load(NAME), Sidecar.load(folder))
    with pytest.raises(SettingError, match="the hub cannot be reached, and this machine has no"):
        Sidecar.load("someone/else")


def test_a_download_that_breaks_leaves_no_half(hub: Hub, folder: Path, monkeypatch) -> None:
    main(["push", str(folder), NAME])
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.breaks = f"resolve/{hub.repositories[NAME].branches['main']}/{TENSORS}"
    with pytest.raises(SettingError, match="cannot read 'someone/small-cache'"):
        Sidecar.load(NAME)
    hub.breaks = None
    assert same(Sidecar.load(NAME), Sidecar.load(folder))


def test_a_repository_without_maps(hub: Hub, folder: Path) -> None:
    main(["push", str(folder), NAME])
    repository = hub.repositories[NAME]
    repository.commits[repository.branches["main"]].pop(TENSORS)
    with pytest.raises(SettingError, match=f"{NAME} has no {TENSORS}"):
        Sidecar.load(NAME)
    with pytest.raises(SettingError, match="the hub has no someone/else that you may see"):
        Sidecar.load("someone/else")


def test_commands_in_another_process(hub: Hub, folder: Path, tmp_path) -> None:
    """By HF_ENDPOINT, as users name another hub."""
    more = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}

    def run(*words: object) -> str:
        command = [sys.executable, "-m", "kvfold", *map(str, words)]
        found = subprocess.run(command, capture_output=True, text=True, env=os.environ | more)
        assert found.returncode == 0, found.stderr
        return found.stdout

    run("push", folder, NAME)
    assert f"maps of {len(Sidecar.load(folder).maps)} layers" in run("inspect", "--maps", NAME)
