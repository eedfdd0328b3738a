"""kvfold push: publish maps beside the weights."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvfold.cli import common
from kvfold.cli.options import Flag
from kvfold.utils.errors import SettingError

Folder = Annotated[
    Path, Parameter(help="Maps beside the weights, as `kvfold compress` wrote them.")
]
Name = Annotated[str, Parameter(help="The hub repository to put them into, USER/NAME.")]


def push(
    folder: Folder,
    name: Name,
    /,
    *,
    private: Flag = False,
    revision: str | None = None,
) -> None:
    """Publish the maps of FOLDER on the Hugging Face hub, all of it or nothing.

    Log in before with `hf auth login`, or set HF_TOKEN. Others then write --maps USER/NAME.

    Parameters
    ----------
    private
        Make a repository that others do not see.
    revision
        Branch to put them on, made if there is none; by default main.
    """
    from kvfold.hub import download
    from kvfold.maps.sidecar import CARD, FILES, Sidecar

    common.quiet()
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name one that `kvfold compress` wrote")
    try:
        sidecar = Sidecar.load(folder)
    except SettingError as error:
        raise ValueError(f"cannot publish {folder}: {error}") from None
    files: dict[str, Path | bytes] = {x: folder / x for x in FILES}
    if not (folder / CARD).exists():
        files[CARD] = sidecar.readme().encode()
    address = download.publish(files, name, private=private, revision=revision)
    named = name if revision is None else f"{name}@{revision}"
    print(f'published {address}: --maps {named}, kvfold.attach(model, "{named}")')
