"""The command line: every command once on a tiny model, and one clear line for every mistake."""

import errno
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from typing import get_args

import pytest
import torch
import transformers as hf
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cli_cases import FEW, TINY, plain, printed, text  # noqa: F401
from commands import refused
from kvfold.__main__ import run
from kvfold.cache.eviction.policies import POLICIES
from kvfold.cli import common
from kvfold.cli.bench_common import empty_table
from kvfold.cli.common import progress
from kvfold.cli.main import COMMANDS, EXAMPLES, app, main
from kvfold.cli.options import Storage
from kvfold.cli.paths import OUTPUTS, REUSED
from kvfold.config import AUTO, BITS, CacheConfig, check, setting, settings_of
from kvfold.evaluation.tasks import TASKS
from kvfold.hub import download
from kvfold.hub.loading import load, load_tokenizer
from kvfold.layout.formats import FORMATS, format_of
from kvfold.recipes import NAMES
from kvfold.utils import versions
from kvfold.utils.chat import encode_chat
from kvfold.utils.files import new_directory


@pytest.fixture(scope="module")
def folded(plain, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "folded"
    arguments = ["--recipe", "small", "--keep", "0.5", *FEW, "--output", str(path)]
    assert main(["compress", str(plain), "--fold", *arguments]) == 0
    return path


@pytest.fixture
def spoiled(plain, tmp_path):
    """A copy of the plain checkpoint to damage."""
    return shutil.copytree(plain, tmp_path / "spoiled")


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "0"], r"keep must be in (0, 1]"),
        (["--keep", "1.5"], r"keep must be in (0, 1]"),
        (["--keep", "nan"], r"keep must be in (0, 1]"),
        (["--keep", "half"], "half"),
        (["--recipe", "tiny"], "unknown recipe 'tiny'; recipes: swift"),
        (["--align", "0"], "align must be at least 1"),
        (["--recover", "-1"], "recover must be at least 0 steps, got -1"),
        (["--budget", "1%"], "'ppl<=1.01'"),
        (
            ["--budget", "ppl<=1.01", "--keep", "0.5"],
            "--set keep=0.5 and --budget ppl<=1.01 exclude",
        ),
        (["--calib", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--dtype", "int8"], "int8"),
        (["--device", "abacus"], "abacus"),
        (["--kep", "0.5"], "--kep"),
    ],
)
def test_compress_refuses_bad_settings(plain, tmp_path, capsys, arguments, message):
    output = tmp_path / "out"
    assert message in refused(capsys, "compress", plain, *FEW, *arguments, "--output", output)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "empty"), (" \n", "empty"), ("too short", "give more text with --calib")],
)
def test_compress_refuses_too_little_calibration_text(plain, tmp_path, capsys, content, message):
    calib = tmp_path / "calib.txt"
    calib.write_text(content, encoding="utf-8")
    arguments = ["--calib", calib, "--output", tmp_path / "out"]
    assert message in refused(capsys, "compress", plain, *arguments)
    assert list(tmp_path.iterdir()) == [calib]


def write_config(path, change):
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def break_weights(path):
    model = hf.LlamaForCausalLM.from_pretrained(path)
    model.model.layers[1].self_attn.k_proj.weight.data[3, 3] = torch.nan
    model.save_pretrained(path)


def cut_weights(path):
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_weights, "layers.1.self_attn.k_proj.weight holds NaN"),
        (cut_weights, "damaged"),
        (lambda path: (path / "model.safetensors").unlink(), "has no weights"),
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "not a JSON object"),
        (lambda path: write_config(path, lambda c: c.update(model_type="bloom")), "bloom"),
        (lambda path: write_config(path, lambda c: c.update(model_type="rwkv9")), "rwkv9"),
        (lambda path: write_config(path, lambda c: c.update(hidden_size=64)), "cannot load"),
    ],
    ids=["nan", "cut", "no weights", "no config", "no json", "bloom", "unknown", "other shape"],
)
def test_compress_refuses_damaged_and_foreign_models(spoiled, tmp_path, capsys, damage, message):
    damage(spoiled)
    output = tmp_path / "out"
    assert message in refused(capsys, "compress", spoiled, "--fold", *FEW, "--output", output)
    assert not output.exists()


def quantized(change):
    return lambda path: write_config(path, lambda c: change(c["quantization_config"]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_weights, "damaged"),
        (quantized(lambda c: c.update(format=99)), "kvfold format 99"),
        (quantized(lambda c: c.update(color="red")), "unknown keys"),
        (quantized(lambda c: c["cache"].pop("layers")), "cache has no layers"),
        (quantized(lambda c: c["cache"]["geometry"].update(head_dim=4)), "do not belong together"),
    ],
    ids=["cut", "format", "keys", "spec", "geometry"],
)
def test_eval_refuses_damaged_artifacts(folded, tmp_path, capsys, damage, message):
    path = shutil.copytree(folded, tmp_path / "spoiled")
    damage(path)
    target = tmp_path / "out.json"
    assert message in refused(capsys, "eval", path, "--max-tokens", "256", "--json", target)
    assert not target.exists()


def test_compress_refuses_a_compressed_model_and_an_output_in_use(folded, plain, tmp_path, capsys):
    assert "compressed already" in refused(
        capsys, "compress", folded, *FEW, "--output", tmp_path / "out"
    )
    (tmp_path / "mine.txt").write_text("precious")
    assert "not an empty directory" in refused(capsys, "compress", plain, "--output", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--ctx", "129"], "ctx: 129 tokens exceed the model's 128 positions"),
        (["eval", "--ctx", "1"], "ctx: 1 is too small"),
        (["eval", "--chunk", "0"], "chunk must be at least 1"),
        (["eval", "--max-tokens", "64"], "less than one window of --set ctx=128"),
        (["eval", "--needle"], "128 positions"),
        (["eval", "--json", "no/such/folder/x.json"], "folder"),
        (["eval", "--tasks", "rows.jsonl"], "rows.jsonl: no such file"),
        (["compare", "--recipes", "small,big"], "unknown recipe 'big'"),
        (["compare", "--recipes", ","], "--recipes: ',' is not"),
        (["compare", "--keep", "0.5,half"], "--keep: '0.5,half' is not"),
        (["compare", "--keep", "0.5,2"], "keep must be in (0, 1]"),
        (["inspect", "--recipe", "none"], "unknown recipe 'none'"),
        (["generate"], "one of --prompt TEXT and --prompt-file FILE"),
        (["generate", "--prompt", "a", "--top-k", "5"], "give --temperature too"),
        (["generate", "--prompt", "a", "--temperature", "0"], "--temperature must be above 0"),
        (["generate", "--prompt", "a", "--max-new-tokens", "999"], "128 positions"),
    ],
)
def test_other_commands_refuse_bad_settings(plain, capsys, arguments, message):
    command, *options = arguments
    assert message in refused(capsys, command, plain, *options)


def test_eval_names_the_text_that_is_shorter_than_a_window(plain, text, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("A few words.", encoding="utf-8")
    line = refused(capsys, "eval", plain, "--text", text, short)
    assert "short: 4 tokens are" in line and "of --set ctx=128 needs 127; give more --text" in line


def test_a_tokenizer_with_more_tokens_than_the_model(long_rows, tmp_path, capsys):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TINY | {"vocab_size": 64}))
    model.config.max_position_embeddings = 512
    model.save_pretrained(tmp_path / "small")
    load_tokenizer("reference:gqa").save_pretrained(tmp_path / "small")
    for options in (["--tasks", long_rows], ["--needle", "--needle-contexts", 1]):
        line = refused(capsys, "eval", tmp_path / "small", *options)
        assert "the model has embeddings of tokens 0 to 63 only" in line


def test_unknown_names_are_one_line_too(capsys, tmp_path):
    assert "reference:gqa" in refused(capsys, "inspect", "reference:xyz")
    assert "does not exist" in refused(capsys, "inspect", tmp_path / "nowhere")
    assert "explode" in refused(capsys, "explode")


@pytest.mark.parametrize("command", [x for x in COMMANDS if x not in ("demo", "inspect")])
def test_a_command_without_arguments_gives_an_example_that_parses(command, capsys):
    line = refused(capsys, command)
    assert line.startswith(f"kvfold: error: kvfold {command} needs ")
    example = line.rpartition("For example: kvfold ")[2].strip()
    assert example == EXAMPLES[command]
    function, *_ = app.parse_args(shlex.split(example), exit_on_error=False, print_error=False)
    assert function is COMMANDS[command]


def test_an_old_transformers_is_named(capsys, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda name: "5.9.1")
    assert "transformers 5.9.1 is too old, kvfold needs 5.17" in refused(capsys, "inspect", "x")


@pytest.mark.parametrize("storage", [[], ["--bits", "8"]], ids=["transformers", "paged"])
def test_generate_refuses_weights_that_are_no_numbers(spoiled, capsys, storage):
    break_weights(spoiled)
    line = refused(
        capsys, "generate", spoiled, "--prompt", "The ship", "--max-new-tokens", "8", *storage
    )
    assert "layers.1.self_attn.k_proj.weight holds NaN" in line


def drop_weights(path):
    """Of one projection, which transformers would draw anew."""
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.self_attn.v_proj.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def test_compress_refuses_a_model_without_some_weights(spoiled, tmp_path, capsys):
    drop_weights(spoiled)
    line = refused(capsys, "compress", spoiled, *FEW, "--output", tmp_path / "out")
    assert "tensors 1 missing (model.layers.0.self_attn.v_proj.weight)" in line


def test_two_writers_of_one_output_do_not_meet(plain, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvfold.api.load_config", None)  # no work is begun
    with new_directory(tmp_path / "out"):
        line = refused(capsys, "compress", plain, "--output", tmp_path / "out")
    assert f"output {tmp_path / 'out'} is being written by another process" in line


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (SafetensorError("I/O error: No space left (os error 28)"), "I/O error: No space left"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    plain, tmp_path, capsys, monkeypatch, error, message
):
    def full(self, path, **_):
        (path / "half").write_text("")
        raise error

    monkeypatch.setattr(hf.PreTrainedModel, "save_pretrained", full)
    target = tmp_path / "out"
    assert message in refused(capsys, "compress", plain, "--fold", *FEW, "--output", target)
    assert not list(tmp_path.iterdir())


def test_termination_cleans_up_and_ends_with_143(plain, tmp_path, capsys, monkeypatch):
    def terminate(*_, **__):
        assert list(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("kvfold.api.load", terminate)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["compress", str(plain), "--output", str(tmp_path / "out")]) == 143
    assert capsys.readouterr().err.splitlines()[-1] == "kvfold: terminated"
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "number, code, word",
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_is_not_lost_in_a_finaliser(number, code, word, monkeypatch, capsys):
    """Python drops what is raised in one, and what a signal's handler raises there."""

    class Dropped:
        def __del__(self):
            os.kill(os.getpid(), number)

    def work(*_, **__):
        Dropped()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            pass

    monkeypatch.setattr("kvfold.hub.loading.load_config", work)
    before = sys.unraisablehook
    assert main(["inspect", "any"]) == code and sys.unraisablehook is before
    assert capsys.readouterr().err == f"kvfold: {word}\n"


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_error_that_a_signal_became_is_the_signal(number, code, monkeypatch):
    """NumPy cannot be imported again where the first import was interrupted and that was hidden."""

    def work(*_, **__):
        try:
            signal.raise_signal(number)
        except BaseException:
            raise RuntimeError("CPU dispatcher tracer already initialized") from None

    monkeypatch.setattr("kvfold.hub.loading.load_config", work)
    before = signal.getsignal(number)
    assert main(["inspect", "any"]) == code and signal.getsignal(number) is before


def test_an_interrupt_while_modules_load_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvfold.cli.main")
    monkeypatch.setattr("builtins.__import__", interrupted)
    code = run()
    monkeypatch.undo()
    assert code == 130 and capsys.readouterr().err == "kvfold: interrupted\n"


def test_a_process_ends_without_a_last_look_at_every_object():
    """It takes a second of a core with torch, of two that a user waits after Ctrl-C."""
    code = (
        "import atexit, gc, sys; sys.argv = ['kvfold', '--version']\n"
        "from kvfold.__main__ import run\n"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count()))\n"
        "run(); gc.collect(); assert not gc.get_freeze_count()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("frozen ")[1]) > 10_000


@pytest.mark.parametrize(
    "command",
    [["--help"], ["eval", "PLAIN", "--set", "ctx=64", "--max-tokens", "64"]],
    ids=" ".join,
)
def test_a_reader_that_leaves_ends_a_command_with_141(plain, command, monkeypatch, capsys):
    """By rich, which ends a process with 1, and by what is printed when all is done."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w", encoding="utf-8"))
    monkeypatch.setattr(app, "console", Console())  # rich silences it from then on
    assert main([str(plain) if word == "PLAIN" else word for word in command]) == 141
    assert capsys.readouterr().err == ""


def test_help_fills_its_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, "compress", "--help").splitlines()
    begin = lines.index("", 2) + 1
    paragraph = lines[begin : lines.index("", begin)]
    for line, after in pairwise(line.strip() for line in paragraph):
        assert len(line) <= 80 < len(f"{line} {after.split()[0]}") + 1, line


def test_a_narrow_terminal_cuts_no_number_of_a_table(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "24")
    table = empty_table("cache", "us", "p10-p90", "out\ntokens/s")
    table.columns[0].no_wrap = False
    table.add_row("a-long-name-in-one-word --keep .5", "1234567", "16 x 32768", "98765")
    common.print_table(table)
    first, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert first == ["out"] and lines[0] == ["cache", "us", "p10-p90", "tokens/s"]
    assert lines[1][-5:] == ["1234567", "16", "x", "32768", "98765"]
    assert "".join([lines[1][0], *map("".join, lines[2:])]) == "a-long-name-in-one-word--keep.5"


def test_characters_that_the_terminal_has_not_are_escaped(plain, tmp_path, monkeypatch):
    (tmp_path / "modèle").symlink_to(plain)
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["inspect", str(tmp_path / "modèle")]) == 0
    assert rb"mod\xe8le (llama)" in shown.getvalue()


def test_a_text_whose_name_is_no_utf8_is_measured_and_recorded(plain, text, tmp_path, capsys):
    odd, record = text.rename(tmp_path / "\udcff.txt"), tmp_path / "record.json"
    assert main(["eval", str(plain), "--text", str(odd), "--ctx", "64", "--json", str(record)]) == 0
    assert list(json.loads(record.read_text())["texts"]) == ["\udcff"]


def test_a_folder_that_was_deleted_is_named(plain, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "was deleted: change to another" in refused(capsys, "compress", plain, "--output", "x")
    with pytest.raises(ValueError, match="was deleted: change to another"):
        load(plain)


def test_an_interrupt_ends_with_130(monkeypatch, capsys, plain):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfold.hub.loading.load_config", interrupt)
    assert main(["inspect", str(plain)]) == 130


# -- what each command does ---------------------------------------------------------------------


def test_compress_says_what_it_saved(plain, tmp_path, capsys):
    stats, output = tmp_path / "stats.safetensors", tmp_path / "new" / "out"
    arguments = ["--recipe", "fast", "--keep", "0.25", "--stats", stats, *FEW]
    out = printed(capsys, "compress", plain, "--fold", *arguments, "--output", output)
    assert "fast: 0.2500 of the numbers kept" in out and "128 -> 32 bytes per token" in out
    assert "kernels on a GPU: 0 of 2 layers in decoding, 0 in prefill. Layer 0 in decod" in out
    assert "(numbers of 32 bits: the kernels read 16, and codes): load the model as bfl" in out
    assert stats.exists() and (output / "tokenizer.json").exists()
    model = hf.AutoModelForCausalLM.from_pretrained(output)
    assert model.config.quantization_config.spec.kept_fraction == 0.25
    again = printed(capsys, "compress", plain, "--fold", *arguments, "--output", tmp_path / "again")
    assert "fast: 0.2500" in again


def test_compress_recovers_and_says_what_it_gained(plain, tmp_path, capsys):
    arguments = ["--recipe", "swift", "--factor", "8", "--recover", "2", *FEW]
    out = printed(capsys, "compress", plain, "--fold", *arguments, "--output", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    made = config["quantization_config"]["provenance"]["recovery"]
    assert made["steps"] == 2 and made["tokens"] == 2 * 16 * 128
    losses = f"{made['before']:.4f} to {made['after']:.4f} nats a token"
    assert f"recovered in 2 steps: {losses} from the original" in out
    out = printed(capsys, "compress", "--help")
    assert "swift" in out and "best on a GPU." in printed(capsys, "compress", "--set", "help")


@pytest.mark.parametrize(
    ("prefer", "more", "levels"),
    [
        ("speed", ["in one pass on a Hopper GPU: no: 2 KV"], [8, 4, 2]),
        ("size", [], [8, 6, 4, 3, 2, 1]),
    ],
)
def test_a_plan_is_for_what_is_preferred(plain, tmp_path, capsys, prefer, more, levels):
    arguments = ["--factor", "3", "--prefer", prefer, *FEW, "--output", tmp_path / "out"]
    out = printed(capsys, "compress", plain, "--fold", *arguments)
    assert out.startswith("recipe swift: a decode step reconstructs no keys\nswift: 0.")
    assert all(words in out for words in more)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    made = config["quantization_config"]["provenance"]
    assert made["prefer"] == prefer and made["levels"] == levels
    shown = printed(capsys, "inspect", tmp_path / "out")
    assert f"prefer: {prefer}" in shown and ("in one pass" in shown) is (prefer == "speed")


def test_a_budget_finds_the_keep(plain, tmp_path, capsys):
    arguments = ["--budget", "ppl<=1.5", "--align", "1", *FEW, "--output", tmp_path / "out"]
    out = printed(capsys, "compress", plain, "--fold", *arguments)
    assert "1.5 allowed" in out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    provenance = config["quantization_config"]["provenance"]
    assert provenance["budget"] == "ppl<=1.5" and 0 < provenance["keep"] < 0.5


def test_inspect_shows_geometry_ranks_and_pictures(plain, folded, tmp_path, capsys):
    out = printed(capsys, "inspect", plain)
    assert "4 query and 2 KV heads of 8" in out and "128 bytes per token" in out
    out = printed(capsys, "inspect", folded, "--html", tmp_path / "folded.html")
    assert "64 bytes per token" in out and "0.5000 of the numbers kept" in out and "pre_rope" in out
    assert "kernels on a GPU: 0 of 2 layers in decoding" in out
    assert "keys and values" in (tmp_path / "folded.html").read_text()
    plan = ["--recipe", "zack", "--keep", "0.25", *FEW, "--html", tmp_path / "plan.html"]
    out = printed(capsys, "inspect", plain, *plan)
    assert "post" in out and "32 bytes per token" in out
    assert "Spectra" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "mxfp4"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "of another library"},
        {"load_in_8bit": True},
        {},
    ],
    ids=str,
)
def test_inspect_takes_no_quantised_weights_for_a_compressed_cache(
    plain, tmp_path, capsys, quantised
):
    shutil.copytree(plain, tmp_path / "model")
    config = json.loads((plain / "config.json").read_text())
    changed = json.dumps(config | {"quantization_config": quantised})
    (tmp_path / "model" / "config.json").write_text(changed)
    wanted = printed(capsys, "inspect", plain).replace(str(plain), str(tmp_path / "model"))
    assert printed(capsys, "inspect", tmp_path / "model") == wanted


def test_eval_writes_every_key(plain, folded, text, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"prompt": "one two", "answer": "three"})
        + "\n"
        + json.dumps({"context": "one", "choices": [" two", " three"], "label": 0})
    )
    target = tmp_path / "result.json"
    options = ["--text", text, "--tasks", rows, "--ctx", 64, "--chunk", 7, "--json", target]
    out = printed(capsys, "eval", folded, *options)
    assert "text: perplexity" in out
    result = json.loads(target.read_text())
    assert result["kept_fraction"] == 0.5 and result["perplexity"] > 1
    assert (result["bytes_per_token"], result["baseline_bytes_per_token"]) == (64, 128)
    positions = 64 * 2 * 3 * 4  # of 64 tokens in 2 layers, which transformers' cache holds beside
    assert result["cache_bytes_allocated"] == 64 * 64 * 2 + positions  # in float32
    assert result["exact_match"] == 0 and result["accuracy"] in (0, 1)
    assert {"perplexity_se", "nll", "tokens", "needle", "texts", "versions"} <= result.keys()
    printed(capsys, "eval", plain, "--tasks", rows, "--json", target)
    result = json.loads(target.read_text())
    assert result["kept_fraction"] == 1.0 and result["perplexity"] is None


def test_eval_without_inputs_reads_a_packaged_text(folded, capsys):
    assert "packaged: perplexity" in printed(capsys, "eval", folded, "--max-tokens", 512)


def test_compare_pairs_recipes_on_the_same_text(plain, text, tmp_path, capsys):
    target, html = tmp_path / "rows.json", tmp_path / "rows.html"
    options = ["--recipes", "zack,zdc,small", "--keep", ".5,.25", "--text", text, "--align", 1]
    options += ["--calib-tokens", 2048]
    out = printed(capsys, "compare", plain, *options, "--json", target, "--html", html)
    assert "original" in out and "small" in out
    result = json.loads(target.read_text())
    names = [(row["recipe"], row["keep"]) for row in result["rows"]]
    pairs = [(recipe, keep) for recipe in ("zack", "zdc", "small") for keep in (0.5, 0.25)]
    assert names == [("original", 1.0), *pairs]
    assert all(row["kept_fraction"] <= row["keep"] for row in result["rows"])
    assert "zdc" in html.read_text() and result["settings"]["ctx"] == 128


def test_compare_pairs_losses_with_a_row_that_is_named(plain, text, capsys):
    """A method may begin with an option, too."""
    options = ["--text", text, "--baseline", "--bits 8"]
    out = printed(capsys, "compare", plain, "--methods", "--bits 4; --bits 8", *options)
    said = " ".join(out.split())
    assert "loss increase over --bits 8 in nats" in said and "scored on all of" in said
    assert "Pages hold numbers that are not quantised in float32" in said


def test_compare_puts_whole_methods_in_one_table(plain, text, tmp_path, capsys):
    """Recipes at sizes, bits, formats and eviction, on the same tokens; statistics are kept."""
    stats, html = tmp_path / "stats.safetensors", tmp_path / "rows.html"
    methods = (
        "small 4x; zack .5 --evict h2o --keep-tokens .5 --page 16; KIVI 2 bits;"
        " zack .5 --align 8; kvquant --bits 4 --format kvquant; int8"
    )
    options = ["--methods", methods, "--text", text, "--calib-tokens", 2048, "--stats", stats]
    out = printed(capsys, "compare", plain, *options, "--json", tmp_path / "a", "--html", html)
    assert "pool" in out and "fp32" in out and "KIVI 2 bits" in out
    assert "pages, fp32" in html.read_text() and "scored on tokens 64 to 127" in html.read_text()
    result = json.loads((tmp_path / "a").read_text())
    rows = {row["recipe"]: row for row in result["rows"]}
    assert list(rows) == ["original", *(name.strip() for name in methods.split(";"))]
    assert result["settings"]["methods"] == methods
    kept = [row["kept_fraction"] for row in rows.values()]
    # 64 tokens: KIVI's all wait; int8 and kvquant store a scale, or outliers and a range, a head.
    assert kept[:5] == [1.0, pytest.approx(0.25, abs=0.02), 0.25, 1.0, 0.5]
    assert 0.25 < kept[5] < kept[6] < 0.65
    assert all(row["pool_fraction"] >= row["kept_fraction"] for row in rows.values())
    windows = [len(row["window_nll"]["text"]) for row in rows.values()]
    assert windows == windows[:1] * 7
    assert "scored on tokens 64 to 127 of" in " ".join(out.split())  # h2o evicts
    assert result["settings"]["scored_from"] == 64
    again = ["compare", plain, *options[:1], "zack .5 --align 8", *options[2:]]
    assert "calibrate" not in printed(capsys, *again, "--json", tmp_path / "b")
    _, alone = json.loads((tmp_path / "b").read_text())["rows"]
    assert alone["kept_fraction"] == 0.5  # and of all tokens, since nothing is evicted beside it
    assert alone["window_nll"] != rows["zack .5 --align 8"]["window_nll"]


def test_a_checkpoint_s_storage_is_compared(folded, text, tmp_path, capsys):
    """It is the original then; what its latents cannot be stored in is refused early."""
    options = ["--text", text, "--json", tmp_path / "a"]
    printed(capsys, "compare", folded, "--methods", "int8; --bits 4 --zeros", *options)
    whole, *rows = json.loads((tmp_path / "a").read_text())["rows"]
    kept = [row["kept_fraction"] for row in rows]
    assert whole["kept_fraction"] == 0.5 > kept[0] > kept[1] > 0.125
    refusal = refused(capsys, "compare", folded, "--methods", "int8; KIVI 2 bits", *options)
    assert "format='kivi'" in refusal


def test_sets_of_methods_are_all_legal():
    """What is named is written as any other method, and neighbours share a recipe's bases."""
    from kvfold.cli.methods import OURS, PUBLISHED, read, written

    found = [method for method, _ in read("papers; int8; ours")]
    assert [method.name for method in found] == [*OURS, *PUBLISHED]
    runs = [recipe for recipe, _ in groupby(method.recipe for method in found) if recipe]
    assert len(runs) == len(set(runs))
    (method, storage), (plain, _) = read("H2O-ZDC; lean 6x")
    assert method.recipe.name == "zdc" and method.keep == storage.keep_tokens == 0.5
    assert written("H2O-ZDC").startswith("zdc .5") and plain.keep == pytest.approx(1 / 6)


def test_an_interrupted_comparison_keeps_its_rows(plain, text, tmp_path, capsys, monkeypatch):
    from kvfold.compression.compressor import Prepared

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Prepared, "plan", interrupt)
    target = tmp_path / "rows.json"
    options = ["--recipes", "lorc", "--keep", ".5", "--text", str(text), "--json", str(target)]
    assert main(["compare", str(plain), *options]) == 130
    assert [row["recipe"] for row in json.loads(target.read_text())["rows"]] == ["original"]
    assert "original" in capsys.readouterr().out


@pytest.mark.parametrize(
    "sampling", [[], ["--temperature", "0.8", "--top-k", "20", "--top-p", "0.9"]]
)
def test_generate_streams_the_same_text_for_a_seed(folded, tmp_path, capsys, sampling):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The ship")
    options = ["--max-new-tokens", "8", "--seed", "3", *sampling]
    one = printed(capsys, "generate", folded, "--prompt", "The ship", *options)
    assert one.strip() and one == printed(
        capsys, "generate", folded, "--prompt-file", prompt, *options
    )


@pytest.fixture
def chatty(folded, tmp_path):
    """The folded model with a chat template."""
    path = shutil.copytree(folded, tmp_path / "chatty")
    tokenizer = load_tokenizer(str(path))
    turn = "{{ message['role'] }}: {{ message['content'] }}\n"
    turns = f"{{% for message in messages %}}{turn}{{% endfor %}}"
    tokenizer.chat_template = "{{ bos_token }}" + turns + "assistant:"
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("storage", [[], ["--paged"]])
def test_a_chat_is_the_prompt_in_the_models_template(chatty, capsys, storage):
    def generated(*prompt: str) -> str:
        capsys.readouterr()
        options = ["--max-new-tokens", "8", *storage]
        assert main(["generate", str(chatty), *options, *prompt]) == 0
        return capsys.readouterr().out

    asked = generated("--chat", "--prompt", "Who went to sea?")
    assert asked.strip() and asked == generated("--prompt", "user: Who went to sea?\nassistant:")
    assert asked != generated("--prompt", "Who went to sea?")
    ids = torch.tensor([encode_chat(load_tokenizer(str(chatty)), "Who went to sea?")])
    first = int(load(str(chatty), device="cpu")(ids).logits[0, -1].argmax())
    ends = {"eos_token_id": [5, first]}
    (chatty / "generation_config.json").write_text(json.dumps(ends))
    assert len(generated("--chat", "--prompt", "Who went to sea?")) < len(asked)


def test_a_chat_needs_a_template(folded, capsys):
    message = "this model has no chat template: leave --chat out"
    assert message in refused(capsys, "generate", folded, "--prompt", "Who?", "--chat")


@pytest.fixture
def long_rows(tmp_path):
    """Two rows, of which one does not fit 128 positions."""
    path = tmp_path / "rows.jsonl"
    rows = ({"prompt": "one two " * times, "answer": "three"} for times in (2, 200))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_prompts_that_were_cut_are_counted(plain, long_rows, text, tmp_path, capsys):
    target = tmp_path / "out.json"
    out = printed(capsys, "eval", plain, "--tasks", long_rows, "--json", target)
    assert "of 2 examples, 1 cut to the model's positions" in out
    (found,) = json.loads(target.read_text())["tasks"].values()
    assert (found["rows"], found["truncated"]) == (2, 1)
    options = ["--recipes", "lorc", "--keep", ".5", "--align", "1", "--text", text]
    out = printed(capsys, "compare", plain, *options, "--tasks", long_rows, "--json", target)
    assert "1 of 2 prompts truncated" in " ".join(out.split())
    for row in json.loads(target.read_text())["rows"]:
        (scores,) = row["tasks"].values()
        assert (scores["rows"], scores["truncated"]) == (2, 1)


def test_long_work_says_how_far_it_is_where_nobody_watches(capsys, monkeypatch):
    monkeypatch.setattr(common, "FIRST", 10)
    now = 0.0
    with progress(lambda: now) as show:
        for done in range(1, 11):
            now += 4
            show("calibrate", done, 10)
        now += 1
        show("bases", 1, 2)
        now += 200
        show("bases", 2, 4)
    assert capsys.readouterr().err.splitlines() == [
        "calibrate: 3 of 10, about 28 s left",  # 12 seconds, then 30 later at the earliest
        "bases: 2 of 4, about 3 min left",
    ]


def test_the_hub_is_asked_once_and_only_for_what_is_not_here(tmp_path, monkeypatch):
    asked = []

    def refuse(request, timeout):
        asked.append(request.full_url)
        raise urllib.error.URLError(ConnectionRefusedError())

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    download._answers.cache_clear()
    assert download.hub_options(str(tmp_path)) == {} and not asked
    assert [download.hub_options("someone/model") for _ in range(2)] == [
        {"local_files_only": True}
    ] * 2
    assert len(asked) == 1
    download._answers.cache_clear()
    answer = urllib.error.HTTPError("", 404, "", None, None)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: raised(answer))
    assert download.hub_options("someone/model") == {}
    download._answers.cache_clear()


def raised(error):
    raise error


# -- flags --------------------------------------------------------------------------------------


def helped(capsys, command: str) -> str:
    """A command's help as one line, without its frame."""
    words = printed(capsys, command, "--help") + printed(capsys, command, "--set", "help")
    return " ".join(words.replace("│", " ").split())


def test_every_setting_of_the_cache_is_a_flag_with_its_legal_values(capsys):
    known = settings_of(CacheConfig)
    assert known.keys() == {field.name for field in fields(CacheConfig)}
    for command in ("eval", "compare", "generate"):
        shown = helped(capsys, command)
        for name, (_, own) in known.items():
            flag, text = own.off or (name, own.text)
            assert f"--{flag.replace('_', '-')}" in shown and text in shown
        assert f"One of {', '.join([*POLICIES, AUTO])}." in shown and ", 6, 4" in shown
    assert set(BITS) == {16}.union(*(format_of(name).widths for name in FORMATS))


def test_flags_become_the_config():
    assert Storage().config() is None and Storage().config(planned=True) == CacheConfig()
    assert Storage(paged=True).config() == CacheConfig()
    asked = Storage(bits=4, no_rotation=True, zeros=True, page=16).config()
    assert asked == CacheConfig(bits=4, rotate=False, zeros=True, page=16)


def test_names_of_recipes_and_rows_are_listed(capsys):
    for command in ("compress", "compare", "frontier"):
        assert f"{NAMES}." in helped(capsys, command)
    for command in ("eval", "compare"):
        assert all(kind.legal in helped(capsys, command) for kind in TASKS.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"least": 8, "unit": "numbers"}, "size must be at least 8 numbers, got 7; ask for more"),
        ({"above": 7}, "size must be above 7, got 7; ask for more"),
        ({"above": 0, "most": 1}, r"size must be in \(0, 1\], got 7; ask for more"),
        ({"choices": (8, 16)}, "size must be one of 8, 16; got 7; ask for more"),
    ],
)
def test_a_setting_is_checked(values, message):
    @dataclass
    class Config:
        size: float | None = setting(8, "Size.", hint="ask for more", **values)

    check(Config(size=None if "most" in values else 8))
    for wrong in (7, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=message.replace("got 7", f"got {wrong}")):
            check(Config(size=wrong))


# -- whole numbers ------------------------------------------------------------------------------


def every_argument(commands=app, path=()):
    """Arguments of every command, with the command's name and their own."""
    for name in commands:
        command = commands[name]
        if not name.startswith("-") and command.default_command is not None:
            yield from ((name, x.name, x) for x in command.assemble_argument_collection())
        if not name.startswith("-"):
            yield from every_argument(command, (*path, name))


def whole_number_flags(commands=app, path=()):
    """Every flag of every command that takes a whole number, behind what the command needs."""
    for name in commands:
        command = commands[name]
        if name.startswith("-"):
            continue
        if command.default_command is not None:
            arguments = command.assemble_argument_collection()
            needed = [word for x in arguments if x.required for word in _filled(x)]
            for argument in arguments:
                if argument.hint is int or int in get_args(argument.hint):
                    yield *path, name, *needed, argument.name
        yield from whole_number_flags(command, (*path, name))


def _filled(argument):
    return [argument.name, "x"] if argument.name.startswith("-") else ["x"]


def test_no_flag_rounds_a_fraction(capsys):
    flags = list(whole_number_flags())
    assert len(flags) > 100 and ("advise", "x", "--bits") in flags
    for i, (*command, name) in enumerate(flags):
        fraction = ("2.5", "-.5", "7.6e0", "3.")[i % 4]
        said = refused(capsys, *command, f"{name}={fraction}")
        assert f"Invalid value for {name}: must" in said.replace("--set ", "--")
        assert f"must be a whole number, got {fraction}" in said


# -- outputs that are inputs --------------------------------------------------------------------

OVERWRITES = {  # what a command would write over; book.txt has a link and a second name
    "pack {plain} --context book.txt --output book.txt": "--output would replace book.txt",
    "pack {plain} --context book.txt --output link": "--output would replace link",
    "pack {plain} --context link --output second": "--output would replace second",
    "pack {plain} --context ./book.txt --output ../{here}/book.txt": "--output would replace",
    "eval {plain} --text book.txt --json book.txt": "--json would replace book.txt, which --text",
    "eval {plain} --tasks book.txt --json book.txt": "book.txt, which --tasks reads",
    "eval {plain} --json {plain}/config.json": "a file of the folder that MODEL reads",
    "eval {plain} --maps maps --json maps/kvfold.json": "a file of the folder that --maps reads",
    "eval {plain} --suite gsm8k=book.txt --json book.txt": "book.txt, which --suite reads",
    "compare {plain} --calib book.txt --html book.txt": "book.txt, which --set calib reads",
    "compare {plain} --stats new --json new": "both name new",
    "frontier {plain} --html a --json ./a": "--html and --json both name",
    "inspect {plain} --html {plain}/model.safetensors": "a file of the folder that MODEL reads",
    "compress {plain} --stats new --output new": "both name new",
    "compress {plain} --output {plain}": "which MODEL reads",
    "demo --model {plain} --output {plain}/tokenizer.json": "the folder that --model reads",
    "advise {plain} --json {plain}/config.json": "a file of the folder that MODEL reads",
    "recover {plain} --output {plain}": "which MODEL reads",
    "bench serve http://h --text book.txt --json book.txt": "book.txt, which --set text reads",
    "bench serve http://h --beside a.json,b.json --json b.json": "b.json, which --set beside reads",
    "bench serve http://h --json x.svg --plot x.svg": "--json and --set plot both name x.svg",
}


@pytest.mark.parametrize("line", OVERWRITES)
def test_no_command_writes_over_what_it_reads(plain, tmp_path, capsys, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "a.json", "b.json"):
        (tmp_path / name).write_text("precious")
    os.symlink("book.txt", "link")
    os.link("book.txt", "second")
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "kvfold.json").write_text("precious")
    before = {x: x.read_bytes() for x in (*plain.iterdir(), *tmp_path.rglob("*")) if x.is_file()}
    said = refused(capsys, *line.format(plain=plain, here=tmp_path.name).split())
    assert OVERWRITES[line] in said
    assert before == {x: x.read_bytes() for x in before}


def test_every_file_that_a_command_names_is_an_input_or_an_output():
    """A new output needs its name in OUTPUTS."""
    inputs = {"--calib", "--text", "--tasks", "--context", "--prompt-file", "--suite-data"}
    inputs |= {"--beside", "--trace", "FOLDER", "MODEL"}
    outputs = {f"--{name.replace('_', '-')}" for name in (*OUTPUTS, REUSED)}
    for command, name, argument in every_argument():
        if "Path" in str(argument.hint):
            assert name in inputs | outputs, command


def test_a_result_is_written_again_beside_what_was_read(plain, folded, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("The ship went out to sea. " * 40)
    for _ in range(2):
        printed(
            capsys, "eval", plain, "--text", tmp_path / "book.txt", "--json", tmp_path / "a.json"
        )
    assert json.loads((tmp_path / "a.json").read_text())["model"] == str(plain)
