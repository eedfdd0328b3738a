"""The Hugging Face hub, where it can be reached: else a model is looked for on this machine alone,
without the retries of half a minute."""

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

from kvfold.hub.gguf import first_line
from kvfold.utils.errors import SettingError

SECONDS = 5.0  # to wait for an answer
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_options(path: str) -> dict[str, Any]:
    """Options of `from_pretrained`: whether to ask the hub for what `path` names."""
    return {} if Path(path).exists() or reachable() else {"local_files_only": True}


def why_not_found(error: Exception) -> str:
    """Why a name that is no directory gives no model, and the way out."""
    if reachable():
        return f"there is no such directory, and as a hub id: {first_line(error)}"
    return (
        f"there is no such directory, {_why_unreachable()}, and this machine has no copy of such a"
        " hub id: give a directory"
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


def is_repository(name: str) -> bool:
    """Whether a name may be a hub repository, USER/NAME or USER/NAME@REVISION."""
    repository, at, revision = name.partition("@")
    return bool(_REPOSITORY.fullmatch(repository)) and bool(at) == bool(revision)


def download(name: str, files: Sequence[str]) -> Path:
    """A folder of this machine with those of `files` that a repository USER/NAME has, at the commit
    that its branch main, or the branch, tag or commit in USER/NAME@REVISION, has now. Without a
    network: what an earlier call left. Raises ValueError with one line that says what is wrong."""
    repository, _, revision = name.partition("@")
    online = reachable()
    try:
        found = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(files),
            local_files_only=not online,
        )
    except Exception as error:  # of many libraries, which share no class
        raise ValueError(_why(error, name) if online else why_not_found(error)) from error
    return Path(found)


def publish(
    files: Mapping[str, Path | bytes],
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
) -> str:
    """Upload files, or what is to be in them, by their paths there, to the repository USER/NAME in
    one commit: all of them or none. Makes the repository, and the branch `revision`, where there
    are none. Returns the address of the commit.

    private: a repository that others do not see; one that they do see is refused. Raises
    SettingError or ValueError with one line that says why not.
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
        made = api.create_commit(name, additions, commit_message=message, revision=revision)
    return made.commit_url


def _make_repository(api: HfApi, name: str, private: bool) -> None:
    """A repository with that name. Raises SettingError for a public one that is to be private."""
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
    """One line for all that may go wrong on the way to a repository."""
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
