"""All eviction policies by name, for `--evict` and `policy=`.

Importing this module imports neither the policies nor torch, because the command line's help needs
the names. A policy has the name of a published method if it does what the authors published, except
for the differences listed in docs/methods.md; other settings of the method have a suffix.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold.cache.eviction.base import Policy

# Name -> "file.function" in this folder; the function takes no arguments and returns the policy.
POLICIES: dict[str, str] = {
    "kv-compress": "attention.kv_compress",
    "kv-compress-full": "attention.kv_compress_full",
    "kvc-w8": "attention.kvc_w8",
    "kvc-w32": "attention.kvc_w32",
    "kvc-w32-l1": "attention.kvc_w32_l1",
    "kvc-full": "attention.kvc_full",
    "snapkv": "attention.snapkv",
    "snapkv-w8": "attention.snapkv_w8",
    "h2o": "attention.h2o",
    "h2o-r32": "attention.h2o_r32",
    "keyformer": "keyformer.keyformer",
    "pyramidkv": "attention.pyramidkv",
    "ada-snapkv": "attention.ada_snapkv",
    "ada-snapkv-w8": "attention.ada_snapkv_w8",
    "keydiff": "keys.keydiff",
    "keydiff-all": "keys.keydiff_all",
    "knorm": "keys.knorm",
    "leverage": "keys.leverage",
    "compactor": "compactor.compactor",
    "kvzip": "replay.kvzip",
    "kvzip-past": "replay.kvzip_past",
    "kvzip+": "kvzip_plus.kvzip_plus",
    "kvgrad": "kvgrad.kvgrad",
    "kvzip-keys": "replay.kvzip_keys",
    "learned": "learned.learned",
    "expected-attention": "expected.expected_attention",
    "streaming": "streaming.streaming",
    "random": "random.random",
}


def get(name: str) -> "Policy":
    """The policy called `name`. Raises ValueError for an unknown one."""
    if name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; policies: {', '.join(POLICIES)}")
    file, function = POLICIES[name].split(".")
    policy: Policy = getattr(import_module(f"{__name__}.{file}"), function)()
    return policy
