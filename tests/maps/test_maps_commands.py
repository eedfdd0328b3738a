"""Maps beside the weights from the command line: made, shown, measured, served, on a model type
that no family knows."""

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import kvfold
from commands import refused
from kvfold.cli import serve_vllm
from kvfold.cli.main import main
from kvfold.engine.api.llm import LLM
from kvfold.maps.sidecar import CARD, FILES, PLAN, Sidecar
from model_types import tiny
from sidecar_cases import bytes_tokenizer

KIND = "qwen3_moe"


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with a model, maps that the command made of it, and what the command said."""
    here = tmp_path_factory.mktemp("here")
    model = tiny(KIND)
    model.lm_head.weight.data.mul_(8)  # so that it is sure of what it says
    model.save_pretrained(here / "model")
    bytes_tokenizer(here).save_pretrained(here / "model")
    return here


def made(here: Path, *options: str, output: str = "maps") -> Path:
    """Maps, made once."""
    words = ["compress", str(here / "model"), "--keep", "0.5", "--max-tokens", "4096"]
    words += ["--align", "1", "--output", str(here / output), *options]
    assert (here / output).exists() or main(words) == 0
    return here / output


def test_the_card_says_what_was_measured(here: Path, capsys) -> None:
    folder = made(here)
    said = capsys.readouterr().out
    assert f"use them: kvfold generate {folder} --prompt TEXT, kvfold serve {folder},\n" in said
    assert f'kvfold.attach(model, "{folder}")' in said
    figures = Sidecar.load(folder).provenance["measured"]
    assert figures["through"] == "kvfold's engine" and figures["tokens"] > 100
    text = (folder / CARD).read_text()
    assert text.startswith("---\nlibrary_name: kvfold\ntags:\n- kvfold\n")
    assert f"{figures['lost']:.4f} nats a token lost" in text
    assert f"{figures['divergence']:.4f} nats a token from the original" in text
    assert 'kvfold.attach(model, "MAPS")' in text and '{"kvfold": {"maps": "MAPS"}}' in text
    assert str(here) not in text  # where a model lies is nobody's business
    assert sorted(x.name for x in folder.iterdir()) == sorted(FILES)


def test_eval_measures_them_through_both_caches(here: Path) -> None:
    model, folder = here / "model", made(here)
    text = here / "text.txt"
    text.write_text("The ship went out to sea, and nobody saw it again. " * 60)
    nll = {}
    for name, options in {
        "attached": (),
        "paged": ("--paged",),
        "bits": ("--bits", "4"),
    }.items():
        file = here / f"{name}.json"
        words = ["eval", str(model), "--text", str(text), "--ctx", "128", "--max-tokens", "512"]
        words += ["--maps", str(folder)]
        assert main([*words, "--json", str(file), *options]) == 0
        record = json.loads(file.read_text())
        nll[name] = record["nll"]
        assert record["maps"] == str(folder)
        if name != "bits":
            assert record["kept_fraction"] == pytest.approx(0.5, abs=0.02)
    assert nll["attached"] == pytest.approx(nll["paged"], abs=1e-4)
    assert abs(nll["bits"] - nll["paged"]) > 1e-4


def test_a_budget(here: Path, capsys) -> None:
    words = ["compress", here / "model", "--budget", "ppl<=1.05", "--align", "1"]
    words += ["--max-tokens", "4096", "--no-check", "--output", here / "within"]
    assert main([str(x) for x in words]) == 0
    assert "ppl<=1.05 allowed" in capsys.readouterr().out
    sidecar = Sidecar.load(here / "within")
    share = sidecar.provenance["keep"]
    assert sidecar.provenance["budget"] == "ppl<=1.05" and sidecar.provenance["ratio"] <= 1.05
    assert sidecar.spec.kept_fraction == pytest.approx(share, abs=0.02)


def test_a_budget_measures_the_maps_that_it_finds(here: Path, monkeypatch) -> None:
    """In the model itself, which is as it was afterwards."""
    model, ids, logits = tiny(KIND), torch.arange(3, 67)[None], {}

    @torch.no_grad()
    def search(prepared, limit, *, align, applied, **_):
        assert limit == 1.05
        logits["whole"] = model(ids).logits
        for share in (0.25, 0.5):
            with applied(prepared.plan(share, align)) as mapped:
                logits[share] = mapped(ids).logits
        assert torch.equal(model(ids).logits, logits["whole"])
        return 0.5, 1.02

    monkeypatch.setattr("kvfold.api.search_keep", search)
    about = {"tokenizer": bytes_tokenizer(here), "max_tokens": 1024, "align": 1}
    sidecar = kvfold.compress(model, budget="ppl<=1.05", **about)
    kvfold.attach(model, sidecar)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits[0.5])
    assert not torch.equal(logits[0.25], logits[0.5])
    assert (sidecar.provenance["keep"], sidecar.provenance["ratio"]) == (0.5, 1.02)


def test_no_check(here: Path) -> None:
    folder = made(here, "--no-check", output="unchecked")
    assert "measured" not in Sidecar.load(folder).provenance
    assert "nats a token" not in (folder / CARD).read_text()


def test_maps_that_break_the_model_are_not_saved(here: Path, capsys, monkeypatch) -> None:
    """What the engine answers has to be what transformers answers with the same maps."""
    install = kvfold.engine.runner.build.install

    def wrong(model, layers, sidecar, *rest):
        layers = install(model, layers, sidecar, *rest)
        for layer in layers:
            layer.value_up.mul_(-3)
        return layers

    monkeypatch.setattr("kvfold.engine.runner.build.install", wrong)
    words = ["compress", here / "model", "--max-tokens", "4096", "--output", here / "bad"]
    assert "answers otherwise than the original" in refused(capsys, *words)
    assert not (here / "bad").exists()


def test_generate_through_both_caches(here: Path, capsys) -> None:
    model, folder = str(here / "model"), str(made(here))
    capsys.readouterr()
    words = ["generate", model, "--maps", folder, "--prompt", "The sea", "--max-new-tokens", "6"]
    assert main(words) == 0
    attached = capsys.readouterr().out.strip()
    assert main([*words, "--paged"]) == 0
    assert capsys.readouterr().out.strip() == attached != ""


def test_a_folder_of_maps_stands_for_its_model(here: Path, capsys, monkeypatch) -> None:
    model, folder = str(here / "model"), str(made(here))
    words = ["--prompt", "The sea", "--max-new-tokens", "6", "--paged"]
    capsys.readouterr()
    assert main(["generate", model, "--maps", folder, *words]) == 0
    named = capsys.readouterr().out
    assert main(["generate", folder, *words]) == 0
    assert capsys.readouterr().out == named != ""
    file = here / "by-folder.json"
    assert main(["eval", folder, "--max-tokens", "512", "--ctx", "128", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert (record["model"], record["maps"]) == (model, folder)
    assert record["kept_fraction"] == pytest.approx(0.5, abs=0.02)
    assert main(["inspect", folder]) == 0
    assert "on disk: " in capsys.readouterr().out
    loaded = kvfold.load(folder)
    kvfold.detach(loaded)  # which had some
    limits = {"max_sequences": 1, "max_tokens": 64}
    by_folder, by_name = LLM(folder, **limits), LLM(model, maps=folder, **limits)
    assert by_folder.runner.pool.layout == by_name.runner.pool.layout
    assert by_folder.runner.pool.layout != LLM(model, **limits).runner.pool.layout
    assert "names others" in refused(capsys, "generate", folder, "--maps", folder, *words)


def test_a_base_that_is_not_here_is_named(here: Path, capsys) -> None:
    sidecar = Sidecar.load(made(here))
    away = replace(sidecar, provenance={**sidecar.provenance, "model": "./gone"})
    away.save(here / "away")
    said = refused(capsys, "generate", here / "away", "--prompt", "a")
    assert "holds maps for ./gone, which is not here under that name (model directory" in said
    assert said.endswith(f"name the model where it is, and --maps {here / 'away'} beside it")
    with pytest.raises(ValueError, match=r"name the model where it is, and maps='"):
        kvfold.load(here / "away")
    words = ["--maps", here / "away", "--prompt", "a", "--max-new-tokens", "1"]
    assert main(["generate", str(here / "model"), *map(str, words)]) == 0


def test_a_model_of_any_type_needs_no_maps(here: Path, capsys, monkeypatch) -> None:
    """Measured and generated from as it is, also from a cache of few bits."""
    model, file = str(here / "model"), here / "plain.json"
    full = 2 * Sidecar.load(made(here)).spec.geometry.full_numbers
    words = ["--max-tokens", "512", "--ctx", "128", "--json", str(file)]
    for options, kept in (((), 1.0), (("--bits", "8"), 0.56)):
        assert main(["eval", model, *words, *options]) == 0
        record = json.loads(file.read_text())
        assert record["kept_fraction"] == pytest.approx(kept, abs=0.1)
        assert record["baseline_bytes_per_token"] == full
    monkeypatch.setattr("kvfold.hub.loading._load_directory", None)
    said = refused(capsys, "eval", model, "--evict", "random", "--keep-tokens", ".5")
    assert "nothing is evicted" in said
    for name in ("inspect", "advise", "compare"):
        assert "is of no family that kvfold folds" in refused(capsys, name, model)
    said = refused(capsys, "compress", model, "--fold", "--output", here / "folded")
    assert "`kvfold compress` without --fold makes them" in said
    assert not (here / "folded").exists()


def test_inspect_shows_them(here: Path, capsys) -> None:
    folder = made(here)
    capsys.readouterr()
    assert main(["inspect", "--maps", str(folder)]) == 0
    said = capsys.readouterr().out
    spec = Sidecar.load(folder).spec
    assert f"({KIND})" in said and f"-> {spec.bytes_per_token()} bytes" in said
    assert "on disk: " in said and "recipe: name swift, basis post_rope" in said
    assert not set("{}[]") & set(said) and "stored bytes" not in said
    for index, layer in enumerate(spec.layers):
        ranks = " ".join(str(x.rank) for x in layer.key_latents)
        assert any(x.split()[:1] == [str(index)] and ranks in x for x in said.splitlines())


def test_another_model_is_refused_before_it_is_loaded(here: Path, capsys, monkeypatch) -> None:
    folder = made(here)
    monkeypatch.setattr("kvfold.hub.loading._load_directory", None)
    for name in ("inspect", "eval", "serve"):
        said = refused(capsys, name, "reference:gqa", "--maps", folder)
        assert "whose hidden_size is 64; this model's is 256" in said
    with pytest.raises(ValueError, match="whose hidden_size is 64"):
        LLM("reference:gqa", maps=folder)


def test_a_server_has_them(here: Path, monkeypatch, capsys) -> None:
    asked = {}

    class Stop(Exception):
        pass

    def llm(_, **settings):
        asked.update(settings)
        raise Stop

    monkeypatch.setattr("kvfold.engine.api.llm.LLM", llm)
    words = ["serve", str(here / "model"), "--maps", str(made(here)), "--bits", "8", "--port", "0"]
    with pytest.raises(Stop):
        main(words)
    assert isinstance(asked["maps"], Sidecar) and asked["bits"] == 8


def test_vllm_gets_them_by_name(here: Path, monkeypatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(serve_vllm, "find_spec", lambda _: object())
    monkeypatch.setattr(os, "execv", lambda _, words: (started.append(words), sys.exit(0)))
    folder = made(here)
    monkeypatch.chdir(here)
    words = ["serve", "model", "--maps", folder.name, "--engine", "vllm", "--bits", "4"]
    with pytest.raises(SystemExit):
        main(words)
    flags = started[0]
    config = json.loads(flags[flags.index("--additional-config") + 1])
    assert config == {"kvfold": {"maps": str(folder), "bits": 4}}
    assert "--quantization" not in flags
    with pytest.raises(SystemExit):
        main(["serve", folder.name, "--engine", "vllm", "--bits", "4"])
    assert str(here / "model") in started[1] and json.dumps(config) in started[1]
    assert started[1][started[1].index("--served-model-name") + 1] == folder.name


@pytest.mark.parametrize("where", ["tensors", "plan", "card"])
def test_a_full_disk_leaves_nothing(here: Path, where: str, capsys, monkeypatch) -> None:
    made(here)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_too(*_, **__):
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    write = Path.write_text
    names = {"plan": PLAN, "card": CARD}

    def some(path: Path, *rest, **more):
        return full() if path.name == names.get(where) else write(path, *rest, **more)

    monkeypatch.setattr(Path, "write_text", some)
    if where == "tensors":
        monkeypatch.setattr("kvfold.maps.sidecar.save_file", full_too)
    before = sorted(here.iterdir())
    words = ["compress", here / "model", "--max-tokens", "4096", "--no-check"]
    said = refused(capsys, *words, "--output", here / "new")
    assert f"cannot write {here / 'new'}: " in said and "No space left on device" in said
    assert sorted(here.iterdir()) == before


def test_a_folder_in_use_is_refused_before_the_work(here: Path, capsys, monkeypatch) -> None:
    folder = made(here)
    monkeypatch.setattr("kvfold.hub.loading._load_directory", None)
    words = ["compress", here / "model", "--output", folder]
    assert "exists and is not an empty directory" in refused(capsys, *words)
