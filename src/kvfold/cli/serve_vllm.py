"""kvfold serve --engine vllm: vLLM's own server, told what the same options mean there."""

import json
import os
import sys
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvfold.cli import common
from kvfold.cli.options import Place, Storage
from kvfold.config import CacheConfig
from kvfold.server.limits import Limits
from kvfold.utils.errors import SettingError

# Settings of the cache by vLLM's names; those of the plugin's come as one object.
NAMES = {"page": "block_size", "kv_bytes": "kv_cache_memory_bytes"}
NO_DEVICE = (
    "`device`: vLLM runs on what it was built for; leave it out, and name GPUs in"
    " CUDA_VISIBLE_DEVICES"
)


def changed(settings: Any) -> dict[str, Any]:
    """Fields that are not as by default."""
    assert all(x.default is not MISSING for x in fields(settings))
    found = {x.name: getattr(settings, x.name) for x in fields(settings)}
    return {x.name: found[x.name] for x in fields(settings) if found[x.name] != x.default}


def cache_settings(cache: CacheConfig, maps: str | None = None) -> dict[str, Any]:
    """Arguments of vLLM's engine, with maps beside the weights or without. Raises SettingError for
    what the plugin does not serve, by name."""
    from kvfold.vllm_plugin.stored import REFUSED, SERVED

    own: dict[str, Any] = {}
    if maps is not None:  # a folder by its whole path: workers may run elsewhere
        own["maps"] = str(Path(maps).resolve()) if Path(maps).exists() else maps
    found: dict[str, Any] = {}
    for name, value in changed(cache).items():
        if name in NAMES:
            found[NAMES[name]] = value
        elif name in SERVED:
            own[name] = value
        else:
            raise SettingError(f"`{name}`: {REFUSED[name]}")
    if own:
        found["additional_config"] = {"kvfold": own}
    return found


def cache_flags(cache: CacheConfig, maps: str | None = None) -> list[str]:
    """The same as flags of its command line."""
    flags = []
    for name, value in cache_settings(cache, maps).items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        flags += [f"--{name.replace('_', '-')}", text]
    return flags


def limit_flags(limits: Limits) -> list[str]:
    """Raises SettingError for what vLLM's server has no option for."""
    wanted = changed(limits)
    most = wanted.pop("max_logprobs", None)
    for name in wanted:
        raise SettingError(
            f"`{name}` is of kvfold's own server, not of vLLM's: leave it, or `engine=vllm`, out"
        )
    return [] if most is None else ["--max-logprobs", str(most)]


def command(
    model: str,
    maps: str | None,
    storage: Storage,
    place: Place,
    limits: Limits,
    **given: Any,
) -> list[str]:
    """What comes after `vllm`. maps: folder or hub id, None for none; given: other flags of vLLM's
    by name, None for what is not set. Raises ValueError for what is not served there."""
    from kvfold.hub.loading import resolve
    from kvfold.vllm_plugin.families import architecture

    config = common.load_config(model, common.load_maps(maps))
    spec = common.saved_spec(config)
    cache = storage.config(planned=spec is not None and spec.planned) or CacheConfig()
    flags = cache_flags(cache, maps) + limit_flags(limits)
    if place.device is not None:
        raise SettingError(NO_DEVICE)
    if spec is not None:
        architecture(config)
    given = {"served_model_name": model, "dtype": place.dtype} | {
        name: value for name, value in given.items() if value is not None
    }
    for name, value in given.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return ["serve", str(resolve(model)), *flags]


def serve(words: list[str], key: str | None) -> None:
    """Become vLLM's server. Raises ValueError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ValueError('--engine vllm needs vllm: pip install "kvfold[vllm]", which has it')
    print("vllm", *words, file=sys.stderr, flush=True)
    if key is not None:  # which ps would show among the words
        os.environ["VLLM_API_KEY"] = key
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *words])
