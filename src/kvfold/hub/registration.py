"""Register kvfold's checkpoint format with transformers, without importing transformers early."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from kvfold.utils.versions import check_transformers

_REGISTRY = "transformers.quantizers.auto"


def register() -> None:
    """Register now if transformers' registry is imported, else right after it is."""
    if _REGISTRY in sys.modules:
        _announce()
    else:
        sys.meta_path.insert(0, _AfterRegistry())


def _announce() -> None:
    check_transformers()
    import_module("kvfold.hub.checkpoint")


class _AfterRegistry(MetaPathFinder):
    """An import hook that finds the registry as usual, and registers kvfold once it has been
    executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_announce(module: ModuleType) -> None:
                run(module)
                _announce()

            spec.loader.exec_module = run_and_announce  # type: ignore[method-assign]
        return spec
