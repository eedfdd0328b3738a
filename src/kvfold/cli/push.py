"""kvfold push: publishes maps on the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvfold.cli import common
from kvfold.cli.options import Flag
from kvfold.utils.errors import SettingError

Folder = Annotated[Path, Parameter(help="Folder of maps, as `kvfold compress` writes it.")]
Name = Annotated[str, Parameter(help="Repository on the hub, USER/NAME.")]


def push(
    folder: Folder,
    name: Name,
    /,
    *,
    private: Flag = False,
    revision: str | None = None,
) -> None:
    """Publish a folder of maps on the Hugging Face hub.

    Log in first with `hf auth login`, or set HF_TOKEN. Others can then use --maps USER/NAME. The
    files are uploaded together or not at all.

    Parameters
    ----------
    private
        Create a private repository.
    revision
        Branch to upload to, which is created if it does not exist; by default main.
    """
    from kvfold.hub import download
    from kvfold.maps.sidecar import CARD, FILES, Sidecar

    common.quiet()
    if not folder.is_dir():
        raise ValueError(f"folder {folder} does not exist; name one that `kvfold compress` wrote")
    try:
        sidecar = Sidecar.load(folder)
    except SettingError as error:
        raise ValueError(f"cannot publish {folder}: {error}") from None
    files: dict[str, Path | bytes] = {x: folder / x for x in FILES}
    if not (folder / CARD).exists():
        files[CARD] = sidecar.readme().encode()
    address = download.publish(files, name, private=private, revision=revision)
    hub_id = name if revision is None else f"{name}@{revision}"
    print(f'published {address}: --maps {hub_id}, kvfold.attach(model, "{hub_id}")')
