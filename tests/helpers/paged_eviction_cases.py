"""What tests of paged eviction share with others."""

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvfold.config import CacheConfig
from kvfold.engine.requests.request import CacheParams
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.evaluation.paged import PagedSession
from kvfold.ops.common.attention import attention
from models import tiny, tokens
from steps import logits_of

PROMPT, MORE, PAGE = 60, 12, 4


LONG = 40  # above the 32 recent tokens that some policies protect


MASKED = "kvfold_test_masked"


def _masked(module, query, key, value, attention_mask, scaling=None, softcap=None, **_):
    """Attention under `module.visible` bool [Hq, T, S]."""
    scale = scaling or module.scaling
    out = attention(query, key, value, module.visible[None], scale, softcap=softcap)[0]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(MASKED, _masked)


def survivors(session: PagedSession) -> list[list[int]]:
    """Positions that every group still holds."""
    runner = session.runner
    _, positions, valid = runner.eviction.tracked(session.sequence.open_slot)
    return [sorted(row[keep].tolist()) for row, keep in zip(positions[0], valid[0], strict=True)]


def dense(name: str, ids: Tensor, kept: list[list[int]], groups) -> Tensor:
    """Logits of the original model in which later queries see only `kept` of the prompt."""
    model = tiny(name)
    total, heads = ids.shape[1], model.config.num_attention_heads
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    for index, layer in enumerate(_attentions(model)):
        visible = causal.repeat(heads, 1, 1)
        for group, positions in zip(groups, kept, strict=True):
            if group.layer != index:
                continue
            gone = sorted(set(range(PROMPT)) - set(positions))
            size = heads // _num_kv_heads(model)
            for head in group.heads:
                for query_head in range(head * size, (head + 1) * size):
                    visible[query_head, PROMPT:, gone] = False
        layer.visible = visible
    model.set_attn_implementation(MASKED)
    with torch.no_grad():
        return model(ids).logits[0, PROMPT:]


def _attentions(model):
    from kvfold.models.families import family_of

    return list(family_of(model.config).attentions(model))


def _num_kv_heads(model) -> int:
    return getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads


def filled(evict: str, lengths: list[int]) -> tuple[ModelRunner, list[PagedSession]]:
    """Sequences of so many tokens, with budgets and protected tokens of their own."""
    config = CacheConfig(kv_bytes=2**23, page=PAGE, evict=evict, keep_tokens=0.5)
    runner = build_runner(tiny("llama-gqa"), config, num_slots=len(lengths), max_tokens=160)
    sessions = [PagedSession(runner).__enter__() for _ in lengths]
    for i, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
        logits_of(session, tokens(1, length, seed=i)[0].tolist(), prompt=length)
        session.sequence.cache = CacheParams(max_cache_tokens=LONG - 4 * i, protected=4 * i)
    return runner, sessions
