"""An OpenAI-compatible HTTP server over `AsyncLLM`. Needs the extra `kvfold[server]`."""

from importlib.util import find_spec

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "msgspec")


def check_installed(*more: str) -> None:
    """Raises ValueError naming the extra if a package of the server, or one of `more`, is
    missing."""
    if missing := [name for name in (*NEEDED, *more) if find_spec(name) is None]:
        raise ValueError(
            f'a server needs {", ".join(missing)}: pip install "kvfold[server]", which has them'
        )
