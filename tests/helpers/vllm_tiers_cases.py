"""What tests and benchmarks of caches that move between tiers share: engines of vLLM that are asked
one after another, each in a process of its own."""

import logging
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch

from forks import forked
from kvfold.vllm_plugin.connectors import DISK_CONNECTOR, NIXL_CONNECTOR

OPTIONS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "block_size": 32, "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64, "enable_prefix_caching": True,
}  # fmt: skip
NEW = 16  # tokens


@dataclass
class Asked:
    """Of every prompt: new tokens, and tokens that were cached; messages of kvfold's log (with
    NIXL: of vLLM's errors), bytes and blocks that moved; blocks that are not free at the end."""

    tokens: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    held: int = 0


def disk(path: Any, role: str = "kv_both", **more: Any) -> dict[str, Any]:
    """The engine's argument for KVFoldDiskConnector."""
    extra = {"path": str(path)} | more
    return transfer(DISK_CONNECTOR, role, **extra)


def transfer(name: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The engine's argument for a connector."""
    config = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
    return {"kv_transfer_config": config}


def nixl(role: str, name: str = NIXL_CONNECTOR, **more: Any) -> dict[str, Any]:
    """The engine's argument for a connector that copies blocks, of a server on a CPU."""
    config = {"kv_connector": name, "kv_role": role, "kv_buffer_device": "cpu"} | more
    extra = {"kv_lease_duration": 3600}
    return {"kv_transfer_config": config | {"kv_connector_extra_config": extra}}


def ask(model: str, prompts: list[list[int]], options: dict, again: bool = False) -> Asked:
    """What an engine answers, greedy, prompt by prompt. again: a second time, after its own cache
    of prefixes was emptied; then the tokens of both times, one after another."""
    if options.get("tensor_parallel_size", 1) == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    answers = Asked()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            answers.log.append(record.getMessage())

    logging.getLogger("vllm.kvfold").addHandler(Handler())
    llm = LLM(model, **options)
    try:
        wanted = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        for _ in range(1 + again):
            for prompt in prompts:
                request = {"prompt_token_ids": prompt}
                (output,) = llm.generate([request], wanted, use_tqdm=False)
                answers.tokens.append(list(output.outputs[0].token_ids))
                answers.cached.append(output.num_cached_tokens)
            assert llm.reset_prefix_cache()
        answers.moved = moved()
    finally:
        llm.llm_engine.engine_core.shutdown()
    return answers


def copied(
    model: str,
    prompts: list[list[int]],
    options: Sequence[dict],
    change: Callable[[list[dict]], list[dict | None]] | None = None,
    killed: bool = False,
) -> Asked:
    """What an engine answers that copies the prompts' blocks from another one. options: of the
    engine that computes the prompts, and of the one that answers. change: what requests say about
    blocks, of what the first engine returned. killed: before the second engine starts."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=_prefill, args=(theirs, model, prompts, options[0]))
    other.start()
    theirs.close()
    try:
        parameters = ours.recv()
        if change is not None:
            parameters = change(parameters)
        if killed:
            other.kill()
            other.join()
        return forked(_fetch, model, prompts, parameters, options[1])
    finally:
        other.kill()
        other.join()


def _prefill(pipe: Any, model: str, prompts: list[list[int]], options: dict) -> None:
    """Compute prompts, say how their blocks are fetched, and keep them."""
    try:
        engine = _nixl_engine(model, options)
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        pipe.send([_answer(engine, x, wanted, 1).kv_transfer_params for x in prompts])
        pipe.recv()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _fetch(
    model: str, prompts: list[list[int]], parameters: list[dict | None], options: dict
) -> Asked:
    answers = Asked()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = (record.exc_info or (None, None))[1]
            answers.log.append(str(error or record.getMessage()))

    engine = _nixl_engine(model, options)
    pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    num_free = pool.get_num_free_blocks()
    logging.getLogger("vllm").addHandler(Handler(logging.ERROR))
    logging.getLogger("vllm.kvfold").addHandler(Handler(logging.WARNING))
    for prompt, wanted in zip(prompts, parameters, strict=True):
        if wanted is not None:
            wanted.pop("remote_prefill_cached_tokens", None)  # else `num_cached_tokens` shows it
        output = _answer(engine, prompt, wanted, NEW)
        answers.tokens.append(list(output.outputs[0].token_ids))
        answers.cached.append(output.num_cached_tokens)
    answers.held = num_free - pool.get_num_free_blocks()
    return answers


def _nixl_engine(model: str, options: dict) -> Any:
    role = options["kv_transfer_config"]["kv_role"]
    # Below those that Linux gives to anybody, and another one in each process of the tests.
    port = 10000 + os.getppid() % 10000 * 2 + (role == "kv_consumer")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    from vllm import LLM

    return LLM(model, **options)


def _answer(engine: Any, prompt: list[int], parameters: dict | None, new: int) -> Any:
    from vllm import SamplingParams

    wanted = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False,
        extra_args=parameters and {"kv_transfer_params": parameters},
    )  # fmt: skip
    (output,) = engine.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
    return output


def moved() -> dict[str, int]:
    """What the disk connector of the engine in this process has moved."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    worker: Any = has_kv_transfer_group() and getattr(get_kv_transfer_group(), "worker", None)
    return dict(worker.moved) if worker else {}


def copy_on_cpu() -> None:
    """Let vLLM's OffloadingConnector run on a CPU, where vLLM has no copies: its own manager,
    scheduler and view of the cache, with copies by PyTorch (vLLM 0.32)."""
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    class Copies(OffloadingWorker):
        def __init__(self, spec: Any, caches: Any) -> None:
            self.caches = [x.tensor for x in caches.tensors]
            chunks = spec.num_chunks
            self.host = [torch.zeros(chunks, x.shape[1], dtype=x.dtype) for x in self.caches]
            self.done: list[Any] = []

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, self.caches, src_spec, self.host, dst_spec)

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, self.host, src_spec, self.caches, dst_spec)

        def _copy(self, job_id: int, source: Any, src: Any, target: Any, dst: Any) -> bool:
            taken, put = (torch.tensor(x.block_ids) for x in (src, dst))
            for a, b in zip(source, target, strict=True):
                b[put] = a[taken]
            self.done.append(TransferResult(job_id=job_id, success=True))
            return True

        def get_finished(self) -> list[Any]:
            done, self.done = self.done, []
            return done

        def wait(self, job_ids: set[int]) -> None:
            return

    CPUOffloadingSpec.get_worker = lambda spec, caches: Copies(spec, caches)
