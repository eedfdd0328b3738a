"""What tests and benchmarks of caches that move between tiers share: engines of vLLM that are asked
one after another, each in a process of its own."""

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from kvfold.vllm_plugin.connectors import DISK_CONNECTOR

OPTIONS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "block_size": 32, "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64, "enable_prefix_caching": True,
}  # fmt: skip
NEW = 16  # tokens


@dataclass
class Asked:
    """Of every prompt: new tokens, and tokens that were cached; messages of kvfold's log, bytes
    and blocks that moved."""

    tokens: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)


def disk(path: Any, role: str = "kv_both", **more: Any) -> dict[str, Any]:
    """The engine's argument for KVFoldDiskConnector."""
    extra = {"path": str(path)} | more
    return transfer(DISK_CONNECTOR, role, **extra)


def transfer(name: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The engine's argument for a connector."""
    config = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
    return {"kv_transfer_config": config}


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
