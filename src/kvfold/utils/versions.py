"""The versions of transformers and vLLM that kvfold is tested with, and what differs between them.
This module imports neither of them."""

import warnings
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# The oldest and the newest release that the tests run with; docs/versions.md names them too.
TRANSFORMERS = ("5.17", "5.24")  # `make test-oldest`, `make test`
VLLM = ("0.25", "0.32")  # tests on an H200, `make test-vllm`

# What kvfold uses of transformers that its minor releases have changed or may change.
TRANSFORMERS_NAMES = {
    "transformers": ("AttentionInterface", "AttentionMaskInterface", "DynamicCache", "StaticCache"),
    "transformers.cache_utils": ("DynamicLayer", "StaticLayer"),
    "transformers.masking_utils": ("ALL_MASK_ATTENTION_FUNCTIONS",),
    "transformers.modeling_utils": ("ALL_ATTENTION_FUNCTIONS",),
    "transformers.quantizers.auto": ("register_quantization_config", "register_quantizer"),
}
VLLM_NAMES = {
    "vllm.distributed.kv_transfer.kv_connector.factory": ("KVConnectorFactory",),
    "vllm.model_executor.layers.quantization": ("register_quantization_config",),
    "vllm.model_executor.models": ("ModelRegistry",),
    "vllm.v1.attention.backends.registry": ("register_backend",),
}


def check_transformers(installed: str | None = None) -> None:
    """Check the version of transformers: `installed`, or the one that is installed.

    Raises ValueError if it is too old. Warns once if it is newer than those that were tested.
    """
    installed = version("transformers") if installed is None else installed
    oldest, newest = TRANSFORMERS
    if _minor(installed) < _minor(oldest):
        raise ValueError(
            f"transformers {installed} is too old, kvfold needs {oldest} or newer;"
            f" run: {_install('transformers', TRANSFORMERS)}"
        )
    if _minor(installed) > _minor(newest):
        _warn_untested("transformers", installed, TRANSFORMERS)


def probe_transformers() -> None:
    """Check that a transformers newer than those that were tested still has what kvfold uses.

    It imports transformers then, and nothing otherwise. Raises ValueError as `check_names` does.
    """
    if _minor(version("transformers")) > _minor(TRANSFORMERS[1]):
        check_names("transformers", TRANSFORMERS_NAMES, TRANSFORMERS)


def check_names(
    package: str, names: Mapping[str, tuple[str, ...]], tested: tuple[str, str]
) -> None:
    """Check that the installed `package` still has what kvfold uses of it.

    names: by module, what it must have; tested: the oldest and newest minor release tested.
    Raises ValueError that says which name is missing and which versions work.
    """
    missing = [
        f"{module}.{name}"
        for module, wanted in names.items()
        for name in wanted
        if not _has(module, name)
    ]
    if missing:
        raise ValueError(
            f"{package} {_installed(package)} has no {', '.join(missing)}, which kvfold uses;"
            f" kvfold is tested with {tested[0]} to {tested[1]}, run: {_install(package, tested)}"
        )


def check_vllm() -> None:
    """Check the installed vLLM: ValueError if it lacks what the plugin uses, a warning if its
    version was not tested."""
    check_names("vllm", VLLM_NAMES, VLLM)
    installed = _installed("vllm")
    # A build from source may call itself 0.0.0 or dev.
    if installed[:1].isdigit() and _minor(installed) > _minor(VLLM[1]):
        _warn_untested("vllm", installed, VLLM)


@cache  # once a process
def _warn_untested(package: str, installed: str, tested: tuple[str, str]) -> None:
    warnings.warn(
        f"{package} {installed} is newer than kvfold was tested with ({tested[0]} to {tested[1]});"
        f" where something fails, run: {_install(package, tested)}",
        stacklevel=3,
    )


def _install(package: str, tested: tuple[str, str]) -> str:
    major, minor = _minor(tested[1])
    return f'pip install "{package}>={tested[0]},<{major}.{minor + 1}"'


def version_of(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed; None if none is."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _installed(package: str) -> str:
    return version_of(package, f"{package}-cpu") or "of an unknown version"


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name)
    except ModuleNotFoundError:
        return False


def _minor(number: str) -> tuple[int, int]:
    major, minor = number.split(".")[:2]
    return int(major), int(minor)


# The forward argument for the cache was renamed in transformers 5.24.
CACHE = "cache" if _minor(version("transformers")) >= (5, 24) else "past_key_values"


def cache_argument(cache: Any) -> dict[str, Any]:
    """The keyword argument that passes a cache to a transformers model's forward."""
    return {CACHE: cache}
