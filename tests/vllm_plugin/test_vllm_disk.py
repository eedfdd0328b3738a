"""Blocks of vLLM's cache in files: keys, faults, the plan of a step, and copies of a cache.

vLLM itself is not needed; `test_vllm_tiers` runs it with this connector.
"""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvfold.vllm_plugin import block_files
from kvfold.vllm_plugin.block_files import BlockFiles, DamagedBlock, block_keys
from kvfold.vllm_plugin.connectors import (
    check_connectors,
    check_disk_connector,
    check_nixl_connector,
    check_own_connectors,
)
from kvfold.vllm_plugin.disk_scheduler import BlockTransfer, DiskScheduler
from kvfold.vllm_plugin.disk_worker import DiskWorker
from kvfold.vllm_plugin.fingerprint import model_digest, named_tensors, tensors_digest

KEY, OTHER = b"k" * 32, b"o" * 32
PAYLOAD = bytes(range(256)) * 4


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path, len(PAYLOAD))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The texts of all warnings so far."""
    caplog.set_level(logging.WARNING, "vllm.kvfold")
    return lambda: [record.getMessage() for record in caplog.records]


def read(files: BlockFiles, key: bytes = KEY) -> bytes:
    payload = bytearray(files.num_bytes)
    files.read(key, memoryview(payload))
    return bytes(payload)


def test_keys_depend_on_all_tokens_before_and_on_the_salt() -> None:
    tokens = list(range(70))
    keys = block_keys(tokens, 16)
    assert len(keys) == 4 and len(set(keys)) == 4, "a part of a block has no key"
    assert block_keys(tokens[:40], 16) == keys[:2]
    assert block_keys(tokens, 16, parents=keys[:2]) == keys, "longer sequences go on from there"
    assert block_keys([99, *tokens[1:]], 16)[3] != keys[3]
    assert not set(block_keys(tokens, 16, salt="a")) & set(keys)
    assert not set(block_keys(tokens, 32)) & set(keys)
    assert not set(block_keys([5] * 64, 16)[:1]) & set(block_keys([5] * 64, 16)[1:])


def test_a_block_comes_back_whole(files: BlockFiles) -> None:
    assert not files.has(KEY)
    assert files.write(KEY, memoryview(PAYLOAD)) and files.has(KEY)
    assert read(files) == PAYLOAD
    assert not BlockFiles(files.folder, files.num_bytes, rank=1).has(KEY), "of another process"
    assert [x.name for x in files.folder.rglob("*") if x.is_file()] == [f"{KEY.hex()}.0"]


@pytest.mark.parametrize("length", [0, 3, block_files.HEADER.size, 200])
def test_a_truncated_block_is_missing_and_written_again(
    length: int, files: BlockFiles, warnings
) -> None:
    files.write(KEY, memoryview(PAYLOAD))
    os.truncate(files.path(KEY), length)
    with pytest.raises(DamagedBlock, match=f"{KEY.hex()}.0"):
        read(files)
    assert not files.has(KEY) and len(warnings()) == 1 and "damaged" in warnings()[0]
    assert not files.has(KEY) and len(warnings()) == 1, "it is gone"
    assert files.write(KEY, memoryview(PAYLOAD)) and read(files) == PAYLOAD


@pytest.mark.parametrize("place", [0, 5, 13, block_files.HEADER.size, -1])
def test_a_changed_byte_is_noticed(place: int, files: BlockFiles) -> None:
    files.write(KEY, memoryview(PAYLOAD))
    data = bytearray(files.path(KEY).read_bytes())
    data[place] ^= 1
    files.path(KEY).write_bytes(data)
    with pytest.raises(DamagedBlock):
        read(files)


def test_a_block_of_other_tokens_is_noticed(files: BlockFiles) -> None:
    files.write(OTHER, memoryview(PAYLOAD))
    files.path(KEY).parent.mkdir()
    os.rename(files.path(OTHER), files.path(KEY))
    with pytest.raises(DamagedBlock, match="checksum"):
        read(files)


def test_a_full_disk_stops_writing_with_one_warning(
    files: BlockFiles, warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(OTHER, memoryview(PAYLOAD))
    write, written = os.write, []

    def full(descriptor: int, data) -> int:
        if len(data) > 100:
            if written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[:100]
            written.append(data)
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not files.write(KEY, memoryview(PAYLOAD))
    assert not files.has(KEY) and read(files, OTHER) == PAYLOAD
    assert not [*files.folder.rglob(f"{block_files.SCRATCH}*")], "half a block is left behind"
    assert not files.write(KEY, memoryview(PAYLOAD)), "not for a minute"
    assert len(warnings()) == 1 and "No space left" in warnings()[0]
    files.paused_until = 0.0
    assert files.write(KEY, memoryview(PAYLOAD)) and read(files) == PAYLOAD


WRITER = """
import os, sys
from pathlib import Path
from kvfold.vllm_plugin.block_files import BlockFiles

write, sizes = os.write, []

def slow(descriptor, data):
    sizes.append(len(data))
    if len(sizes) == 2:  # the payload, after its header
        write(descriptor, data[: len(data) // 2])
        print("half", flush=True)
        sys.stdin.read()
    return write(descriptor, data)

os.write = slow
BlockFiles(Path(sys.argv[1]), 1024).write(b"k" * 32, memoryview(bytes(1024)))
"""


def test_a_writer_killed_in_mid_write_leaves_nothing_to_read(files: BlockFiles) -> None:
    command = [sys.executable, "-c", WRITER, str(files.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"half\n"
        assert not files.has(KEY), "while it writes"
        writer.send_signal(signal.SIGKILL)
    assert not files.has(KEY)
    with pytest.raises(FileNotFoundError):
        read(files)
    assert files.remove_scratch() == 0, "it may belong to a process that runs"
    (scratch,) = files.folder.rglob(f"{block_files.SCRATCH}*")
    old = time.time() - 2 * block_files.SCRATCH_SECONDS
    os.utime(scratch, (old, old))
    assert files.remove_scratch() == 1 and not scratch.exists()
    assert files.write(KEY, memoryview(PAYLOAD)) and read(files) == PAYLOAD


# Copies of a cache

SHAPES = {
    "bytes": lambda n: torch.zeros(n, 24, dtype=torch.int8),
    "odd bytes": lambda n: torch.zeros(n, 9, dtype=torch.int8),
    "keys and values first": lambda n: torch.zeros(2, n, 4, 2, 3, dtype=torch.bfloat16),
    "heads before tokens": lambda n: torch.zeros(n, 2, 4, 6).permute(0, 2, 1, 3),
    "all layers of a block together": lambda n: torch.zeros(n, 3, 16, dtype=torch.int8)[:, 1],
    "smaller blocks of the kernel": lambda n: torch.zeros(n * 2, 8, dtype=torch.float16),
}


def numbers(cache: torch.Tensor, block: int, num_blocks: int) -> torch.Tensor:
    dim = 0 if cache.shape[0] % num_blocks == 0 else 1
    each = cache.shape[dim] // num_blocks
    return cache.narrow(dim, block * each, each)


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    return {name: make(5) for name, make in SHAPES.items()}


def finish(worker: DiskWorker) -> None:
    worker.shutdown()


def test_blocks_of_any_cache_come_back(caches, tmp_path: Path) -> None:
    for cache in caches.values():
        cache.copy_(torch.randint(1, 100, cache.shape))
    saved = {name: cache.clone() for name, cache in caches.items()}
    worker = DiskWorker(caches | {"shares memory": caches["bytes"]}, 5)
    assert worker.num_bytes == sum(numbers(x, 0, 5).nbytes for x in caches.values())
    worker.connect(tmp_path, 0)
    worker.store([BlockTransfer("a", [KEY, OTHER], [3, 1])])
    finish(worker)
    for cache in caches.values():
        cache.zero_()
    worker = DiskWorker(caches, 5)
    worker.connect(tmp_path, 0)
    worker.load([BlockTransfer("b", [OTHER, KEY], [4, 0])])
    finish(worker)
    assert worker.take_loaded() == {"b"} and not worker.take_loaded() and not worker.take_failed()
    for name, cache in caches.items():
        assert torch.equal(numbers(cache, 4, 5), numbers(saved[name], 1, 5)), name
        assert torch.equal(numbers(cache, 0, 5), numbers(saved[name], 3, 5)), name
        assert not any(numbers(cache, block, 5).any() for block in (1, 2, 3)), name
    assert worker.moved["loaded_bytes"] == 2 * worker.num_bytes


def test_what_is_stored_is_the_block_at_that_time(tmp_path: Path) -> None:
    """The block may be another request's as soon as the step ends."""
    cache = torch.ones(4, 64, dtype=torch.int8)
    worker = DiskWorker({"a": cache}, 4)
    worker.connect(tmp_path, 0)
    worker.store([BlockTransfer("a", [KEY], [2])])
    cache.zero_()
    finish(worker)
    assert read(BlockFiles(tmp_path, 64)) == bytes([1]) * 64


def test_a_damaged_block_fails_alone_and_is_written_again(tmp_path: Path, warnings) -> None:
    cache = torch.ones(4, 64, dtype=torch.int8)
    files = BlockFiles(tmp_path, 64)
    for key, number in ((KEY, 6), (OTHER, 7)):
        files.write(key, memoryview(bytes([number]) * 64))
    data = bytearray(files.path(KEY).read_bytes())
    files.path(KEY).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    worker = DiskWorker({"a": cache}, 4)
    worker.connect(tmp_path, 0)
    worker.load([BlockTransfer("a", [KEY, OTHER], [2, 1]), BlockTransfer("b", [OTHER], [3])])
    finish(worker)
    assert worker.take_loaded() == {"a", "b"} and worker.take_failed() == {2}
    assert cache[:, 0].tolist() == [1, 7, 1, 7], "a damaged block is never copied"
    assert len(warnings()) == 1 and "checksum" in warnings()[0]
    assert not files.has(KEY) and worker.moved["damaged_blocks"] == 1


def test_a_block_that_was_deleted_fails_alone(tmp_path: Path, warnings) -> None:
    worker = DiskWorker({"a": torch.ones(4, 64, dtype=torch.int8)}, 4)
    worker.connect(tmp_path, 0)
    worker.load([BlockTransfer("a", [KEY], [2])])
    finish(worker)
    assert worker.take_loaded() == {"a"} and worker.take_failed() == {2} and len(warnings()) == 1


def test_blocks_that_come_too_fast_are_left_out(tmp_path: Path, warnings) -> None:
    worker = DiskWorker({"a": torch.ones(8, 64, dtype=torch.int8)}, 8, queue_bytes=127)
    worker.connect(tmp_path, 0)
    worker.store([BlockTransfer("a", [KEY, OTHER], [1, 2])])
    worker.store([BlockTransfer("b", [KEY, OTHER], [1, 2])])
    finish(worker)
    assert worker.moved["skipped_blocks"] == 4 and len(warnings()) == 1
    assert not [x for x in tmp_path.rglob("*") if x.is_file()]


def test_a_cache_without_a_dimension_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 3\) has no dimension of 5 blocks"):
        DiskWorker({"a": torch.ones(3, 3)}, 5)


# The plan of a step

BLOCK = 4


def a_request(name: str, tokens: int, **fields) -> SimpleNamespace:
    defaults = {"lora_request": None, "mm_features": [], "prompt_embeds": None, "cache_salt": None}
    all_tokens = list(range(tokens))
    return SimpleNamespace(
        request_id=name, all_token_ids=all_tokens, num_tokens=tokens, **defaults | fields
    )


def step(new=(), cached=(), resumed=(), **scheduled: int) -> SimpleNamespace:
    """A step. new and cached: (name, block ids, computed tokens). scheduled: new tokens by name."""
    names = ["req_id", "block_ids", "num_computed_tokens"]
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(**dict(zip(names, (x, (ids,), n), strict=True))) for x, ids, n in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[x for x, _, _ in cached],
            new_block_ids=[None if ids is None else (ids,) for _, ids, _ in cached],
            num_computed_tokens=[n for _, _, n in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled,
    )


@pytest.fixture
def scheduler(tmp_path: Path) -> DiskScheduler:
    made = DiskScheduler(BLOCK)
    made.connect(tmp_path, [8, 8])
    return made


def stored(scheduler: DiskScheduler, tokens: int, ranks=(0, 1)) -> list[bytes]:
    keys = block_keys(list(range(tokens)), BLOCK)
    for key in keys:
        for rank in ranks:
            scheduler.files[rank].write(key, memoryview(bytes(8)))
    return keys


def test_blocks_are_stored_when_they_are_whole(scheduler: DiskScheduler) -> None:
    request = a_request("a", 10)
    assert scheduler.num_matched_tokens(request, 0) == 0
    scheduler.allocated(request, [7, 8, 9], 0)
    keys = block_keys(list(range(16)), BLOCK)
    loads, stores = scheduler.plan(step(new=[("a", [7, 8, 9], 0)], a=6))
    assert not loads and stores == [BlockTransfer("a", keys[:1], [7])]
    _, stores = scheduler.plan(step(cached=[("a", None, 6)], a=4))
    assert stores == [BlockTransfer("a", keys[1:2], [8])]
    # A token that was sampled, and one that was scheduled before it was known.
    request.all_token_ids.append(10)
    request.num_tokens = 11
    assert scheduler.plan(step(cached=[("a", [5], 10)], a=2))[1] == []
    request.all_token_ids += [11, 12]
    request.num_tokens = 13
    assert scheduler.plan(step(cached=[("a", None, 12)], a=1))[1] == [
        BlockTransfer("a", keys[2:3], [9])
    ]
    scheduler.finished("a")
    assert not scheduler.sequences


def test_blocks_of_a_resumed_request_have_moved(scheduler: DiskScheduler) -> None:
    request = a_request("a", 10)
    scheduler.allocated(request, [7, 8], 0)
    scheduler.plan(step(new=[("a", [7, 8], 0)], a=4))
    _, stores = scheduler.plan(step(cached=[("a", [1, 2, 3], 0)], resumed=["a"], a=9))
    assert stores[0].block_ids == [2]


def test_blocks_that_follow_what_is_computed_are_restored(scheduler: DiskScheduler) -> None:
    keys, request = stored(scheduler, 16), a_request("a", 17)
    assert scheduler.num_matched_tokens(request, 4) == 12
    scheduler.allocated(request, [6, 7, 8, 9, 5], 12)
    loads, stores = scheduler.plan(step())
    assert loads == [BlockTransfer("a", keys[1:], [7, 8, 9])] and not stores
    assert scheduler.plan(step()) == ([], []), "once"
    _, stores = scheduler.plan(step(new=[("a", [6, 7, 8, 9, 5], 16)], a=1))
    assert not stores, "they are in files already"


def test_a_last_token_is_left_to_compute(scheduler: DiskScheduler) -> None:
    stored(scheduler, 16)
    assert scheduler.num_matched_tokens(a_request("a", 16), 0) == 12
    assert scheduler.num_matched_tokens(a_request("b", 3), 0) == 0


def test_a_missing_block_ends_what_is_restored(scheduler: DiskScheduler) -> None:
    keys = stored(scheduler, 16)
    scheduler.files[1].remove(keys[2])
    assert scheduler.num_matched_tokens(a_request("a", 17), 0) == 8, "of all processes"
    assert scheduler.num_matched_tokens(a_request("b", 17), 6) == 0, "blocks begin at multiples"


@pytest.mark.parametrize(
    "special", [{"lora_request": "a"}, {"mm_features": ["image"]}, {"prompt_embeds": 1}]
)
def test_what_tokens_do_not_decide_is_not_cached(special: dict, scheduler: DiskScheduler) -> None:
    stored(scheduler, 16)
    request = a_request("a", 17, **special)
    assert scheduler.num_matched_tokens(request, 0) == 0
    scheduler.allocated(request, [1, 2, 3, 4, 5], 0)
    assert scheduler.plan(step(new=[("a", [1, 2, 3, 4, 5], 0)], a=17)) == ([], [])


def test_a_salt_keeps_requests_apart(scheduler: DiskScheduler) -> None:
    stored(scheduler, 16)
    assert scheduler.num_matched_tokens(a_request("a", 17, cache_salt="mine"), 0) == 0


def test_a_failed_load_is_not_tried_again(scheduler: DiskScheduler) -> None:
    stored(scheduler, 16)
    one, two = a_request("a", 17), a_request("b", 17)
    for request, blocks in ((one, [1, 2, 3, 4, 9]), (two, [5, 6, 7, 8, 10])):
        scheduler.num_matched_tokens(request, 0)
        scheduler.allocated(request, blocks, 16)
    scheduler.loads_failed({3})
    assert scheduler.num_matched_tokens(one, 0) == 0
    assert scheduler.num_matched_tokens(two, 0) == 16, "its blocks are others"


def test_nothing_is_found_before_the_workers_named_their_cache() -> None:
    scheduler = DiskScheduler(BLOCK)
    request = a_request("a", 17)
    assert scheduler.num_matched_tokens(request, 0) == 0
    scheduler.allocated(request, [1, 2, 3, 4, 5], 0)
    assert scheduler.plan(step(new=[("a", [1, 2, 3, 4, 5], 0)], a=17)) == ([], [])


# The fingerprint


def test_a_digest_depends_on_every_byte_and_its_place() -> None:
    tensors = {
        "a": torch.arange(7, dtype=torch.int8),
        "b": torch.randn(3, 5).T,
        "c": torch.ones((), dtype=torch.bfloat16),
        "d": torch.zeros(0),
        "e": torch.arange(9, dtype=torch.uint8)[1:],
    }
    digest = tensors_digest(tensors.items())
    assert tensors_digest({name: x.clone() for name, x in tensors.items()}.items()) == digest
    for name in "abce":
        changed = {key: x.clone() for key, x in tensors.items()}
        last = (-1,) * changed[name].dim()
        changed[name][last] += 1
        assert tensors_digest(changed.items()) != digest, name
    words = torch.arange(9)
    assert tensors_digest([("a", words)]) != tensors_digest([("a", words.flip(0))])
    assert tensors_digest((tensors | {"b": tensors["b"].T}).items()) != digest


def test_a_digest_of_a_model_has_its_buffers() -> None:
    model = torch.nn.Linear(3, 3)
    before = model_digest(model)
    model.register_buffer("cos", torch.zeros(3), persistent=False)
    with_buffer = model_digest(model)
    model.cos += 1
    assert len({before, with_buffer, model_digest(model)}) == 3


@pytest.mark.parametrize("numbers", [torch.empty(0), torch.empty(3, device="meta")])
def test_weights_that_are_elsewhere_are_refused(numbers: torch.Tensor) -> None:
    model = torch.nn.Linear(3, 3)
    model.weight = torch.nn.Parameter(numbers)
    with pytest.raises(ValueError, match="numbers of weight are not in the model"):
        model_digest(model)


def test_tensors_of_nested_data_are_found() -> None:
    value = {"a": [torch.zeros(1), (torch.ones(1),)], "b": 3}
    assert [name for name, _ in named_tensors(value, "x")] == ["x.a.0", "x.a.1.0"]


# Which connectors are safe


def a_config(name: str | None, module: str | None = None, policy: str = "fail", **extra):
    transfer = SimpleNamespace(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_connector_extra_config=extra,
        kv_load_failure_policy=policy,
        kv_buffer_device="cuda",
    )
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        model_config=SimpleNamespace(is_hybrid=False),
        device_config=SimpleNamespace(device_type="cuda"),
    )


CPU_ONLY = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {}}
DISK = {"kv_connector": "KVFoldDiskConnector"}


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(kv_transfer_config=None),
        a_config(None),
        a_config("KVFoldDiskConnector", path="/x"),
        a_config("KVFoldDiskConnector", "kvfold.vllm_plugin.disk_connector", path="/x"),
        a_config("KVFoldNixlConnector"),
        a_config("OffloadingConnector", cpu_bytes_to_use=1),
        a_config("OffloadingConnector", spec_name="TieringOffloadingSpec", cpu_bytes_to_use=1),
        a_config("SimpleCPUOffloadConnector"),
        a_config("MultiConnector", connectors=[CPU_ONLY, DISK]),
    ],
)
def test_safe_connectors_are_allowed(config) -> None:
    check_connectors(config)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (a_config("ExampleConnector"), "ExampleConnector"),
        (a_config("LMCacheConnectorV1"), "LMCacheConnectorV1"),
        (a_config("NixlConnector"), "NixlConnector"),
        (a_config("NixlPushConnector"), "NixlPushConnector"),
        (a_config("KVFoldDiskConnector", "other.module"), "KVFoldDiskConnector"),
        (a_config("KVFoldNixlConnector", "other.module"), "KVFoldNixlConnector"),
        (a_config("OffloadingConnector", "other.module"), "OffloadingConnector"),
        (a_config("OffloadingConnector", spec_name="Mine", spec_module_path="x"), "spec_name Mine"),
        (
            a_config(
                "OffloadingConnector",
                spec_name="TieringOffloadingSpec",
                secondary_tiers=[{"type": "fs"}],
            ),
            "secondary_tiers",
        ),
        (a_config("MultiConnector", connectors=[DISK, {"kv_connector": "NixlConnector"}]), "Nixl"),
    ],
)
def test_connectors_that_could_restore_blocks_of_another_cache_are_refused(config, name) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*wrong tokens. Safe.*KVFoldDiskConnector"):
        check_connectors(config)


def test_damaged_blocks_must_not_fail_requests() -> None:
    with pytest.raises(ValueError, match='must be "recompute"; got "fail"'):
        check_disk_connector(a_config("MultiConnector", connectors=[DISK]))
    check_disk_connector(a_config("MultiConnector", policy="recompute", connectors=[DISK]))
    check_disk_connector(a_config("KVFoldDiskConnector"))


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("model_config", "is_hybrid", True, "recurrent states"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
    ],
)
@pytest.mark.parametrize("name", ["KVFoldDiskConnector", "KVFoldNixlConnector"])
def test_servers_whose_blocks_do_not_move(part, field, value, message, name) -> None:
    config = a_config(name)
    assert check_own_connectors(config)
    setattr(getattr(config, part), field, value)
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        check_own_connectors(config)


def test_nixl_compares_fingerprints_and_copies_blocks_from_where_they_are() -> None:
    check_nixl_connector(a_config("KVFoldNixlConnector"))
    with pytest.raises(ValueError, match="enforce_handshake_compat must be true"):
        check_nixl_connector(a_config("KVFoldNixlConnector", enforce_handshake_compat=False))
    config = a_config("MultiConnector", connectors=[{"kv_connector": "KVFoldNixlConnector"}])
    with pytest.raises(ValueError, match="not tried in a MultiConnector"):
        check_own_connectors(config)
    config = a_config("KVFoldNixlConnector")
    config.kv_transfer_config.kv_buffer_device = "cpu"
    with pytest.raises(ValueError, match='must be "cuda"; got "cpu"'):
        check_nixl_connector(config)
    assert not check_own_connectors(a_config("OffloadingConnector"))
