"""Files that were cut, edited or damaged are refused in one line, or read as they were written.

Every format that is read is tried; `make test-all` tries more of each.
"""

import gzip
import json
import lzma
import math
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import faults
import ggufs
import model_types
from faults import Fault, Findings, Peak
from fuzz_cases import model_of
from kvfold import LLM, PackedContext
from kvfold.api import save as save_model
from kvfold.bench.serve_load import read_trace
from kvfold.calibration.statistics import Statistics
from kvfold.calibration.statistics.moments import Moment
from kvfold.cli.bench_serve import read_report
from kvfold.cli.suites import read_results
from kvfold.engine.requests import packed
from kvfold.evaluation.suites import read_suite
from kvfold.evaluation.suites.run import changes
from kvfold.evaluation.tasks import read_tasks
from kvfold.hub import loading
from kvfold.maps.layers import attention_layers
from kvfold.maps.plain import Means, full_spec, plain_maps
from kvfold.maps.sidecar import PLAN, TENSORS, Sidecar, probes_of
from kvfold.models.families import family_of
from kvfold.utils.chat import encode_chat
from kvfold.utils.text import read_text
from kvfold.utils.tokens import encode_prompt
from models import tokens

# Values of a config.json that say how a model is used or trained, not what it is; those that a
# user may edit.
INDIFFERENT = re.compile(r"_token_id|max_position|initializer|dropout|use_cache|provenance")
MOST = 256 * 2**20  # bytes that reading a small file may take; a header's numbers may name more


@dataclass(frozen=True)
class Format:
    """A file, what reads it, in a form that `==` compares, and where its header ends. table: where
    its table of tensors begins, for a format without a digest, whose other bytes are believed."""

    file: Path
    read: Callable[[], Any]
    header: int | None = None
    table: int | None = None

    def faults(self, content: bytes, rng: random.Random, count: int) -> Iterator[Fault]:
        yield from faults.cuts(content, rng, count)
        if self.table is not None:
            yield from faults.flips(content, rng, 2 * count, self.header, self.table)
            yield from faults.sizes(content, rng, count, self.header, self.table)
            return
        yield from faults.flips(content, rng, count)
        yield from faults.flips(content, rng, count, self.header)
        yield from faults.sizes(content, rng, count, self.header)


def safetensors(file: Path, read: Callable[[], Any]) -> Format:
    return Format(file, read, faults.safetensors(file.read_bytes())[1])


def of_model(model: Any) -> Any:
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        logits = model(ids).logits
    numbers = {name: x.numpy().tobytes() for name, x in model.state_dict().items()}
    return numbers, logits.numpy().tobytes()


def packed_context(folder: Path) -> Format:
    settings = {"page": 8, "kv_bytes": 2**22, "max_sequences": 2, "max_tokens": 256}
    llm = LLM(model_of("llama-gqa", None), evict="kvzip", keep_tokens=1.0, **settings)
    context = llm.pack(tokens(1, 120, seed=5)[0].tolist(), factor=5, measure=False)
    context.save(folder / "book.kvf")

    def read() -> Any:
        found = PackedContext.load(folder / "book.kvf")
        llm.check_context(found)
        pages = [x.numpy().tobytes() for x in found.pages]
        return found.token_ids, found.lengths.tolist(), pages, found.origin, found.summary

    return safetensors(folder / "book.kvf", read)


def statistics(folder: Path) -> Format:
    key = {"model": "one", "text": "two"}
    layers = {i: {"hidden": Moment.of(torch.randn(9, 6))} for i in range(2)}
    Statistics(key, layers).save(folder / "stats")

    def read() -> Any:
        return {
            (layer, name): [x.numpy().tobytes() for x in (y.second, y.first, y.weight)]
            for layer, stored in Statistics.load(folder / "stats", key).layers.items()
            for name, y in stored.items()
        }

    return safetensors(folder / "stats", read)


def weights(folder: Path) -> Format:
    return safetensors(folder / "model" / "model.safetensors", checkpoint(folder / "model"))


def config(folder: Path) -> Format:
    return Format(folder / "model" / "config.json", checkpoint(folder / "model"))


def checkpoint(folder: Path) -> Callable[[], Any]:
    save_model(model_of("llama-gqa", "small"), None, folder)
    return lambda: of_model(loading.load(folder))


def gguf(folder: Path) -> Format:
    file = folder / "tiny.gguf"
    ggufs.write(file, ggufs.random_llama())
    table, data = ggufs.places(file)
    return Format(file, lambda: of_model(loading.load(str(file))), data, table)


def text_gz(folder: Path) -> Format:
    return text(folder / "text.txt.gz", gzip.compress)


def text_xz(folder: Path) -> Format:
    return text(folder / "text.txt.xz", lzma.compress)


def text(file: Path, pack: Callable[[bytes], bytes]) -> Format:
    words = [f"The ship {x} went out to sea." for x in range(400)]
    file.write_bytes(pack("\n".join(words).encode()))
    return Format(file, lambda: read_text(file))


def suite_gz(folder: Path) -> Format:
    file = folder / "suite.jsonl.gz"
    file.write_bytes(gzip.compress(SUITE))
    return Format(file, lambda: read_suite("math", file))


def maps_plan(folder: Path) -> Format:
    return maps(folder, PLAN)


def maps_tensors(folder: Path) -> Format:
    return maps(folder, TENSORS)


def maps(folder: Path, name: str) -> Format:
    model = model_types.tiny("llama")
    layers = attention_layers(model)
    geometry = family_of(model.config).geometry(model.config)
    made = {}
    for layer in layers:
        zeros = torch.zeros(layer.num_kv_heads, layer.head_dim)
        made[layer.name] = plain_maps(Means(zeros, zeros + 1))
    spec = full_spec(geometry, len(layers))
    about = {"recipe": {"name": "swift"}, "model": "reference:gqa"}
    Sidecar(maps=made, spec=spec, base=probes_of(layers), provenance=about).save(folder / "maps")

    def read() -> Any:
        found = Sidecar.load(folder / "maps")
        numbers = {
            (layer, key): x.numpy().tobytes()
            for layer, own in found.maps.items()
            for key, x in own.tensors().items()
        }
        return numbers, found.spec, dict(found.base), dict(found.provenance)

    return Format(folder / "maps" / name, read)


FORMATS = (packed_context, statistics, weights, config, gguf)
CHECKED = (text_gz, text_xz, suite_gz, maps_plan, maps_tensors)  # those have a digest, or a sum


@pytest.mark.parametrize("seed, count", [(0, 12), pytest.param(1, 300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", (*FORMATS, *CHECKED))
def test_a_damaged_file_is_refused_or_read_as_it_was(make, seed, count, tmp_path) -> None:
    tried, rng, findings = make(tmp_path), random.Random(seed), Findings()
    whole, content = tried.read(), tried.file.read_bytes()
    assert whole == tried.read()
    with Peak() as peak:
        for said, changed in (*tried.faults(content, rng, count), *edits(tried, rng, count)):
            tried.file.write_bytes(changed)
            findings.check(tried.read, whole, said)
    tell(make.__name__, findings, peak)


def edits(tried: Format, rng: random.Random, count: int) -> Iterator[Fault]:
    """A header or a config with one value of another kind."""
    content = tried.file.read_bytes()
    if tried.file.suffix == ".json":
        for said, found in faults.values(json.loads(content), rng, count):
            if not INDIFFERENT.search(said):
                yield said, json.dumps(found).encode()
    elif tried.file.suffix not in (".gguf", ".gz", ".xz"):
        for said, found in faults.values(faults.safetensors(content)[0], rng, count):
            yield said, faults.with_header(content, found)


def tell(name: str, findings: Findings, peak: Peak) -> None:
    counts = findings.counts
    print(
        f"{name}: {counts['refused']} refused, {counts['read as before']} read as before,"
        f" {len(findings.wrong)} wrong, {peak.bytes / 2**20:.0f} MiB more at most"
    )
    assert not findings.wrong, "\n".join(findings.wrong)
    assert counts["refused"] > counts["read as before"] or name in ("config", "maps_plan")
    assert peak.bytes < MOST


@pytest.mark.parametrize("make", (*FORMATS, *CHECKED))
def test_what_is_no_file_is_refused(make, tmp_path) -> None:
    tried, findings = make(tmp_path), Findings()
    tried.read()
    for said, place in faults.places_that_are_no_files(tmp_path):
        tried.file.unlink()
        place.rename(tried.file)
        findings.check(tried.read, None, said)
        if said == "folder":
            tried.file.rmdir()
            tried.file.touch()
    assert findings.counts["refused"] == 5 and not findings.wrong, findings.wrong


# -- formats without a digest: what is changed is believed, or refused in a line ------------------

SUITE = b"\n".join(b'{"question": "What is %d?", "answer": "#### %d"}' % (x, x) for x in range(20))
TASKS = b"\n".join(b'{"prompt": "Say %d", "answer": "%d"}' % (x, x) for x in range(9))
TRACE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"".join(
    b"2023-11-16 18:17:0%d.97,%d,%d\n" % (x, x + 5, x + 1) for x in range(9)
)
MOONCAKE = b"\n".join(
    b'{"timestamp": %d, "input_length": %d, "output_length": 2}' % (x, x + 5) for x in range(9)
)
ROW = {"rate": "1", "offered_per_s": 1.0, "requests_per_s": 0.9} | {
    name: {"mean": 1.0, "p50": 1.0, "p90": 1.5, "p99": 2.0}
    for name in ("ttft_ms", "tbt_ms", "normalised_ms")
}
REPORT = {
    "benchmark": "serve",
    "settings": {"label": "one"},
    "rows": [ROW, ROW | {"tbt_ms": None}],
    "answers": [{"rate": "1", "number": x, "text": "So.", "error": None} for x in range(3)],
}
ANSWERED = {"id": "1", "group": "", "score": 1.0, "kind": "right", "detail": "", "text": "4"}
ANSWERED |= {"num_tokens": 2, "finish_reason": "stop", "error": None}
RESULT = {"suite": "math", "engine": "kvfold", "chat": False, "max_new_tokens": 9, "seconds": 1.0}
RESULT |= {"length": None, "truncated": 0, "judge_seconds": 0.5}
RESULTS = {"suites": {"math": RESULT | {"answers": [ANSWERED] * 2}}}
DEEP = [
    ("deep list", b"[" * 100_000 + b"]" * 100_000),
    ("deep object", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    ("digits", b'{"prompt": ' + b"9" * 5000 + b"}"),
    ("zeros", b"\0" * 1000),
    ("utf-16", "The ship".encode("utf-16")),
]
BELIEVED: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
    "tasks.jsonl": (TASKS, read_tasks),
    "suite.jsonl": (SUITE, lambda file: read_suite("math", file)),
    "trace.csv": (TRACE, read_trace),
    "trace.jsonl": (MOONCAKE, read_trace),
    "serve.json": (json.dumps(REPORT).encode(), lambda file: drawn(read_report(file))),
    "results.json": (json.dumps(RESULTS).encode(), lambda file: compared(file)),
}


def drawn(report: Any) -> list[Any]:
    """What a figure and a comparison read of a report."""
    rows = [x for x in report["rows"] if x["offered_per_s"] is not None]
    rows.sort(key=lambda row: row["offered_per_s"])
    names = ("ttft_ms", "tbt_ms", "normalised_ms")
    times = [row[x][key] + 0.0 for row in rows for x in names if row[x] for key in ("mean", "p99")]
    answers = {(x["rate"], x["number"]): x["text"] + "" for x in report["answers"]}
    return [times, answers, report["settings"]["label"] + ""]


def compared(file: Path) -> Any:
    before = read_results(file, {"math": []})["math"]
    return changes(before, before), before.right, before.num_tokens, before.kinds, before.record()


@pytest.mark.parametrize("seed, count", [(0, 25), pytest.param(1, 500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BELIEVED)
def test_a_changed_file_without_a_digest_ends_in_no_traceback(name, seed, count, tmp_path) -> None:
    content, read = BELIEVED[name]
    file, findings, rng = tmp_path / name, Findings(), random.Random(seed)
    file.write_bytes(content)
    assert read(file)
    changed = [*faults.cuts(content, rng, count), *faults.flips(content, rng, count), *DEEP]
    changed += faults.sizes(content, rng, count)
    if name.endswith(".json"):
        found = faults.values(json.loads(content), rng, 4 * count)
    elif name.endswith("jsonl"):
        found = faults.values(json.loads(content.splitlines()[0]), rng, 2 * count)
    else:
        found = iter(())
    changed += [(said, json.dumps(x).encode()) for said, x in found]
    with Peak() as peak:
        for said, x in changed:
            file.write_bytes(x)
            findings.check(lambda: bool(read(file)), True, said)
    print(name, findings.counts, peak.bytes)
    assert not findings.wrong and peak.bytes < MOST, "\n".join(findings.wrong)


@pytest.mark.parametrize("seed, count", [(0, 4), pytest.param(1, 60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_changed_tokenizer_ends_in_no_traceback(name, seed, count, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(loading.resolve("reference:gqa"), folder)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    file, findings, rng = folder / name, Findings(), random.Random(seed)
    content = file.read_bytes()

    def read() -> bool:
        tokenizer = loading.load_tokenizer(str(folder))
        return bool(encode_prompt(tokenizer, "The ship") and [encode_chat(tokenizer, "hello")])

    assert read()
    changed = [*faults.cuts(content, rng, count), *faults.flips(content, rng, count), *DEEP]
    if name.endswith("json"):
        whole = json.loads(content)
        parts = {
            key: x for key, x in whole.items() if key != "model"
        }  # which is thousands of words
        changed += [
            (said, json.dumps(x | ({"model": whole["model"]} if "model" in whole else {})).encode())
            for said, x in faults.values(parts, rng, 3 * count)
        ]
    for said, x in changed:
        file.write_bytes(x)
        findings.check(read, True, said)
    print(name, findings.counts)
    wrong = [x for x in findings.wrong if "read wrongly" not in x]  # an empty text is no harm
    assert not wrong, "\n".join(wrong)


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


fast_xz = partial(lzma.compress, preset=0)


@pytest.mark.parametrize("pack, end", [(gzip.compress, "gz"), (fast_xz, "xz")])
@pytest.mark.parametrize("inside", [b"a", b"\n", b"\0"], ids=["text", "lines", "zeros"])
def test_what_unpacks_to_gigabytes_is_refused(pack, end, inside, tmp_path, monkeypatch) -> None:
    """Of a smaller bound, here; it is read up to that and no further."""
    monkeypatch.setattr("kvfold.utils.text.MOST_TEXT", 2**22)
    file = tmp_path / f"bomb.jsonl.{end}"
    file.write_bytes(pack(inside * 2**26))
    assert file.stat().st_size < 2**17
    with Peak() as peak, pytest.raises(ValueError, match="more than 4194304 bytes of text"):
        read_tasks(file)
    assert peak.bytes < 2**25


def test_many_short_lines_take_no_more_than_the_text(tmp_path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(TASKS + b"\n" * 2**24)
    with Peak() as peak:
        assert len(read_tasks(tmp_path / "tasks.jsonl")) == 9
    assert peak.bytes < 2**27  # a list of them took 128 MiB more


def test_a_large_json_object_is_refused_before_it_is_parsed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvfold.utils.text.MOST_JSON", 2**20)
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'{"prompt": [' + b"[]," * 2**20 + b"[]]}")
    with pytest.raises(ValueError, match="larger than 1048576 bytes"):
        read_tasks(file)


@pytest.mark.parametrize("seed, count", [(0, 30), pytest.param(1, 400, marks=pytest.mark.slow)])
def test_changed_metadata_of_a_gguf_file_ends_in_no_traceback(seed, count, tmp_path) -> None:
    """Changed numbers and words are believed: the format has no digest."""
    file, findings, rng = tmp_path / "tiny.gguf", Findings(), random.Random(seed)
    ggufs.write(file, ggufs.random_llama())
    content, (table, _) = file.read_bytes(), ggufs.places(file)
    changed = [*faults.flips(content, rng, count, 1500), *faults.sizes(content, rng, count, 1500)]
    for said, x in (*changed, *faults.flips(content, rng, count, table)):
        file.write_bytes(x)
        findings.check(lambda: bool(loading.load_config(str(file))), True, said)
        findings.check(lambda: bool(loading.load_tokenizer(str(file))), True, said)
    assert not findings.wrong, "\n".join(findings.wrong)


METADATA = {  # key, its struct, wrong values
    "llama.block_count": ("I", (0, 1, 3, 100_000, 2**32 - 1)),
    "llama.rope.freq_base": ("f", (0.0, -1.0, math.nan, math.inf)),
    "llama.attention.layer_norm_rms_epsilon": ("f", (0.0, -1e-5, math.nan, math.inf)),
    "llama.attention.head_count": ("I", (0, 3, 8, 2**32 - 1)),
    "llama.embedding_length": ("I", (0, 16, 2**32 - 1)),
    "llama.feed_forward_length": ("I", (0, 1, 2**32 - 1)),
}


def test_a_gguf_file_whose_tensors_do_not_tile_it_is_refused(tmp_path) -> None:
    tried, findings = gguf(tmp_path), Findings()
    content = tried.file.read_bytes()
    for said, changed in directed(tried.file):
        tried.file.write_bytes(changed)
        findings.check(tried.read, None, said)
    tried.file.write_bytes(content)
    assert tried.read() and findings.counts["refused"] > 250 and not findings.wrong, findings.wrong


def directed(file: Path) -> Iterator[Fault]:
    """Every tensor with other types and offsets, every number of METADATA with other values."""
    reader, content = ggufs.gguf.GGUFReader(file), file.read_bytes()
    for key, (kind, wrong) in METADATA.items():
        for value in wrong:
            place = reader.fields[key].offset + 8 + len(key) + 4
            yield f"{key} {value}", _put(content, place, struct.pack(f"<{kind}", value))
    for x in reader.tensors:
        place = x.field.offset + 8 + len(x.name) + 4 + 8 * len(x.shape)
        for kind in (1, 2, 8, 24, 26, 28, 30, 99):  # F16, Q4_0, Q8_0, whole numbers, BF16, none
            yield f"{x.name} of type {kind}", _put(content, place, struct.pack("<I", kind))
        here = x.data_offset - reader.data_offset
        for offset in {0, 32, 2**64 - 32, here + 32, here + 1} - {here}:
            yield f"{x.name} at {offset}", _put(content, place + 4, struct.pack("<Q", offset))


def _put(content: bytes, place: int, new: bytes) -> bytes:
    return content[:place] + new + content[place + len(new) :]


# -- edits that a packed context's digest fits ---------------------------------------------------


def test_a_packed_context_of_other_kinds_is_refused_with_a_digest_that_fits(tmp_path) -> None:
    tried = packed_context(tmp_path)
    content, rng = tried.file.read_bytes(), random.Random(0)
    about = json.loads(faults.safetensors(content)[0]["__metadata__"]["kvfold"])
    del about["digest"]
    whole = load(content)
    changed = [about | {name: value} for name in packed.ORIGIN for value in ([], None, 3, {})]
    changed += [found for _, found in faults.values(about, rng, 60)]
    cases = [(found, whole) for found in changed]
    for name, x in whole.items():
        cases += [(about, whole | {name: y}) for y in (x.float(), x[None], x[:0], x.long())]
        cases.append((about, {key: y for key, y in whole.items() if key != name}))
    ids = whole["token_ids"]
    wrong_ids = [ids - 10**6, ids + 10**6, ids[:2]]
    cases += [(about, whole | {"token_ids": x}) for x in wrong_ids]
    cases += [(about, whole | {"rows": x}) for x in (-whole["rows"], whole["rows"][:-1])]
    cases += [(about, whole | {"pages.0": whole["pages.0"][:-1]})]
    cases += [(about, whole | {"pages.0": whole["pages.0"][:, :-16].contiguous()})]
    for i, (said, tensors) in enumerate(cases):
        digest = packed._digest(said, tensors)
        metadata = {packed.NAME: json.dumps({**said, "digest": digest})}
        tried.file.write_bytes(save(tensors, metadata=metadata))
        try:
            found = tried.read()
        except ValueError:
            continue
        assert i < len(changed) and said.keys() >= set(packed.ORIGIN), said
        assert found[0] == tuple(ids.tolist())


def test_pages_that_do_not_fit_are_not_kept(tmp_path) -> None:
    """A pool that fails to load pages has all of its pages afterwards, and loads others."""
    settings = {"page": 8, "kv_bytes": 2**22, "max_sequences": 2, "max_tokens": 256}
    llm = LLM(model_of("llama-gqa", None), evict="kvzip", keep_tokens=1.0, **settings)
    context = llm.pack(tokens(1, 120, seed=5)[0].tolist(), factor=5, measure=False)
    pool, free = llm.runner.pool, llm.runner.pool.free_bytes
    shared = pool.placeholder(120, context.lengths)
    for content in ((), (context.pages[0][:-1],), (context.pages[0].repeat(2, 1),)):
        assert not pool.can_load(context.lengths, content)
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            pool.load(shared, content)
        assert not pool.has(shared) and pool.free_bytes == free
    assert pool.can_load(context.lengths, context.pages)
    pool.load(shared, context.pages)
    assert pool.has(shared)
