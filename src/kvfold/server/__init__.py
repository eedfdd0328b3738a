"""An OpenAI-compatible server: HTTP on one side, an `AsyncLLM` on the other. An extra, `server`."""

from importlib.util import find_spec

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "msgspec")


def check_installed(*more: str) -> None:
    """Raises ValueError naming the extra where a package is missing."""
    if missing := [name for name in (*NEEDED, *more) if find_spec(name) is None]:
        raise ValueError(
            f'a server needs {", ".join(missing)}: pip install "kvfold[server]", which has them'
        )
