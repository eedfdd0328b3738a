"""kvfold serve --engine vllm: starts vLLM's server with the options of `kvfold serve`."""

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

# Settings of the cache that vLLM has under another name. The plugin's settings are one JSON object.
NAMES = {"page": "block_size", "kv_bytes": "kv_cache_memory_bytes"}
NO_DEVICE = (
    "`device`: vLLM uses the devices that it was built for; leave it out, and select GPUs with"
    " CUDA_VISIBLE_DEVICES"
)


def changed(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults, by name."""
    assert all(x.default is not MISSING for x in fields(settings))
    values = {x.name: getattr(settings, x.name) for x in fields(settings)}
    return {x.name: values[x.name] for x in fields(settings) if values[x.name] != x.default}


def cache_settings(cache: CacheConfig, maps: str | None = None) -> dict[str, Any]:
    """Arguments of vLLM's engine for a cache, and maps if any. Raises SettingError for a setting
    that the plugin does not serve."""
    from kvfold.vllm_plugin.model_cache import REFUSED, SERVED

    plugin: dict[str, Any] = {}
    if maps is not None:  # an absolute path: workers may run in another folder
        plugin["maps"] = str(Path(maps).resolve()) if Path(maps).exists() else maps
    arguments: dict[str, Any] = {}
    for name, value in changed(cache).items():
        if name in NAMES:
            arguments[NAMES[name]] = value
        elif name in SERVED:
            plugin[name] = value
        else:
            raise SettingError(f"`{name}`: {REFUSED[name]}")
    if plugin:
        arguments["additional_config"] = {"kvfold": plugin}
    return arguments


def cache_flags(cache: CacheConfig, maps: str | None = None) -> list[str]:
    """The same settings as flags of vLLM's command line."""
    flags = []
    for name, value in cache_settings(cache, maps).items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        flags += [f"--{name.replace('_', '-')}", text]
    return flags


def limit_flags(limits: Limits) -> list[str]:
    """Flags of vLLM's server for limits. Raises SettingError for limits that it does not have."""
    settings = changed(limits)
    max_logprobs = settings.pop("max_logprobs", None)
    for name in settings:
        raise SettingError(
            f"`{name}` is a setting of kvfold's own server, not of vLLM's: leave out either it or"
            " `engine=vllm`"
        )
    return [] if max_logprobs is None else ["--max-logprobs", str(max_logprobs)]


def command(
    model: str,
    maps: str | None,
    storage: Storage,
    place: Place,
    limits: Limits,
    **options: Any,
) -> list[str]:
    """The words of a command line after `vllm`.

    maps: folder or hub id, or None. options: more flags of vLLM by name; None: not set. Raises
    ValueError for settings that vLLM does not serve.
    """
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
    options = {"served_model_name": model, "dtype": place.dtype} | {
        name: value for name, value in options.items() if value is not None
    }
    for name, value in options.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return ["serve", str(resolve(model)), *flags]


def serve(words: list[str], key: str | None) -> None:
    """Replace this process by vLLM's server. Raises ValueError if vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ValueError('--engine vllm needs vLLM: pip install "kvfold[vllm]"')
    print("vllm", *words, file=sys.stderr, flush=True)
    if key is not None:  # not among the words, which ps shows to all users
        os.environ["VLLM_API_KEY"] = key
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *words])
