"""Use the Hugging Face hub if it can be reached; otherwise look for models on this machine alone,
without half a minute of retries."""

import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from kvfold.utils.errors import SettingError, first_line

SECONDS = 5.0  # to wait for an answer
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_options(path: str) -> dict[str, Any]:
    """Options of `from_pretrained` for `path`: `local_files_only` if the hub cannot be reached."""
    return {} if Path(path).exists() or reachable() else {"local_files_only": True}


def why_not_found(error: Exception) -> str:
    """Why a name that is not a directory gives no model, and the way out."""
    if reachable():
        return f"there is no such directory, and as a hub id: {first_line(error)}"
    return (
        f"there is no such directory, {_why_unreachable()}, and this machine has no copy of such a"
        " hub id: give a directory"
    )


def reachable() -> bool:
    """Whether the hub may be asked, and answers."""
    return not constants.is_offline_mode() and _answers(constants.ENDPOINT)


@lru_cache
def _answers(address: str) -> bool:
    """Whether the server answers; cached for the process."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS)
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # another client may have the certificate
    except OSError:
        return False
    return True


def is_repository(name: str) -> bool:
    """Whether a name has the form USER/NAME or USER/NAME@REVISION."""
    repository, at, revision = name.partition("@")
    return bool(_REPOSITORY.fullmatch(repository)) and bool(at) == bool(revision)


def download(name: str, files: Sequence[str]) -> Path:
    """Download those of `files` that a repository USER/NAME has, at the current commit of branch
    main or of REVISION in USER/NAME@REVISION. Without a network: use what an earlier call
    downloaded. Returns the local folder. Raises ValueError with one line."""
    repository, _, revision = name.partition("@")
    online = reachable()
    try:
        folder = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(files),
            local_files_only=not online,
        )
    except Exception as error:  # of many libraries, which share no class
        raise ValueError(_why(error, name) if online else why_not_found(error)) from error
    return Path(folder)


def publish(
    files: Mapping[str, Path | bytes],
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
) -> str:
    """Upload files (paths, or their contents), by their paths in the repository, to USER/NAME in
    one commit: all or none. Creates the repository and the branch `revision` if necessary. Returns
    the URL of the commit.

    private: the repository must not be public.

    Raises SettingError or ValueError with one line.
    """
    if not is_repository(name) or "@" in name:
        raise ValueError(
            f"a hub repository is USER/NAME, of letters, digits, -, _ and .; got {name!r}"
        )
    if not reachable():
        raise ValueError(f"cannot publish {name}: {_why_unreachable()}; nothing was published")
    if get_token() is None:
        raise ValueError(
            f"cannot publish {name}: you are not logged in; run `hf auth login`, or set HF_TOKEN to"
            " a token that may write"
        )
    api = HfApi(endpoint=constants.ENDPOINT)
    with _publishing(name):
        _make_repository(api, name, private)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        additions = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)
            for path, content in files.items()
        ]
        message = "Upload kvfold maps"
        commit = api.create_commit(name, additions, commit_message=message, revision=revision)
    return commit.commit_url


def _make_repository(api: HfApi, name: str, private: bool) -> None:
    """Create the repository if it does not exist. Raises SettingError if it must be private but is
    public."""
    try:
        is_private = api.model_info(name).private
    except RepositoryNotFoundError:
        api.create_repo(name, private=private, exist_ok=True)
        return
    if private and not is_private:
        raise SettingError(
            f"`private`: {name} exists and is public; make it private in its settings, or take"
            " another name"
        )


@contextmanager
def _publishing(name: str) -> Iterator[None]:
    """Context manager: one line for every error while publishing."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:  # of many libraries, which share no class
        why = _why(error, name)
        raise ValueError(
            f"cannot publish {name}: {why}; nothing is half-published, try again"
        ) from error


def _why(error: Exception, name: str) -> str:
    """What an error of a hub that was reached means."""
    if isinstance(error, RevisionNotFoundError):
        return f"the hub has {name.partition('@')[0]}, but no revision {name.partition('@')[2]!r}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 403:
        return "your token may not do that there: take one that may write, or another name"
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return (
            f"the hub has no {name} that you may see: check the name, and where it is private log"
            " in with `hf auth login`"
        )
    if isinstance(error, HfHubHTTPError):
        return f"the hub says {first_line(error)}"
    return f"the connection to the hub failed ({type(error).__name__}: {first_line(error)})"


def _why_unreachable() -> str:
    return "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the hub cannot be reached"
