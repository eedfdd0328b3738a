"""The Hugging Face hub, where it can be reached: else a model is looked for on this machine alone,
without the retries of half a minute."""

import ssl
import urllib.error
import urllib.request
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from kvfold.gguf import first_line

SECONDS = 5.0  # to wait for an answer


def where(path: str) -> dict[str, Any]:
    """Options of `from_pretrained`: whether to ask the hub for what `path` names."""
    return {} if Path(path).exists() or reachable() else {"local_files_only": True}


def why_not(error: Exception) -> str:
    """Why a name that is no directory gives no model, and the way out."""
    if reachable():
        return f"there is no such directory, and as a hub id: {first_line(error)}"
    away = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the hub cannot be reached"
    return (
        f"there is no such directory, {away}, and this machine has no copy of such a hub id: give a"
        " directory"
    )


def reachable() -> bool:
    """Whether the hub may be asked, and answers anything at all."""
    return not constants.is_offline_mode() and _answers(constants.ENDPOINT)


@lru_cache
def _answers(address: str) -> bool:
    """Asked once for a process."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS)
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # another client may have the certificate
    except OSError:
        return False
    return True
