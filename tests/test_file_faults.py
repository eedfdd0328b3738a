"""Files that were cut, edited or damaged are refused in one line, or read as they were written.

Every format that is read is tried; `make test-all` tries more of each.
"""

import json
import math
import random
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import faults
import ggufs
from faults import Fault, Findings, Peak
from kvfold import LLM, PackedContext, loading
from kvfold.api import save as save_model
from kvfold.compression.statistics import Statistics
from kvfold.compression.statistics.moments import Moment
from kvfold.engine import packed
from models import tokens
from test_fuzz import model_of

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
        return found.token_ids, found.rows.tolist(), pages, found.made, found.summary

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


FORMATS = (packed_context, statistics, weights, config, gguf)


@pytest.mark.parametrize("seed, count", [(0, 12), pytest.param(1, 300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", FORMATS)
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
    elif tried.file.suffix != ".gguf":
        for said, found in faults.values(faults.safetensors(content)[0], rng, count):
            yield said, faults.with_header(content, found)


def tell(name: str, findings: Findings, peak: Peak) -> None:
    counts = findings.counts
    print(
        f"{name}: {counts['refused']} refused, {counts['read as before']} read as before,"
        f" {len(findings.wrong)} wrong, {peak.bytes / 2**20:.0f} MiB more at most"
    )
    assert not findings.wrong, "\n".join(findings.wrong)
    assert counts["refused"] > counts["read as before"] or name == "config"
    assert peak.bytes < MOST


@pytest.mark.parametrize("make", FORMATS)
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
    changed = [about | {name: value} for name in packed.MADE for value in ([], None, 3, {})]
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
        assert i < len(changed) and said.keys() >= set(packed.MADE), said
        assert found[0] == tuple(ids.tolist())


def test_pages_that_do_not_fit_are_not_kept(tmp_path) -> None:
    """A pool that fails to load pages has all of its pages afterwards, and loads others."""
    settings = {"page": 8, "kv_bytes": 2**22, "max_sequences": 2, "max_tokens": 256}
    llm = LLM(model_of("llama-gqa", None), evict="kvzip", keep_tokens=1.0, **settings)
    context = llm.pack(tokens(1, 120, seed=5)[0].tolist(), factor=5, measure=False)
    pool, free = llm.runner.pool, llm.runner.pool.free_bytes
    shared = pool.unloaded(120, context.rows)
    for content in ((), (context.pages[0][:-1],), (context.pages[0].repeat(2, 1),)):
        assert not pool.takes(context.rows, content)
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            pool.load(shared, content)
        assert not pool.has(shared) and pool.free_bytes == free
    assert pool.takes(context.rows, context.pages)
    pool.load(shared, context.pages)
    assert pool.has(shared)
