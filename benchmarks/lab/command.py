"""Runs one function as a script, with flags, help and errors as those of `kvfold`'s commands."""

import sys
from collections.abc import Callable, Sequence

from cyclopts import App, Parameter

from kvfold.cli import main
from kvfold.cli.options import converted


def run(command: Callable[..., None], arguments: Sequence[str] | None = None) -> int:
    """Run `command` with `arguments` (default: the process's own); returns the exit code, as
    `kvfold.cli.main.run`."""
    app = App(
        name=f"bench_{command.__name__}.py",
        help_format="plaintext",
        version_flags=[],
        default_parameter=Parameter(converter=converted),
    )
    app.default(command)
    return main.run(app, sys.argv[1:] if arguments is None else list(arguments))
