"""Runs one function as a script, with flags, help and errors as those of `kvfold`'s commands."""

import sys
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, Parameter

from kvfold.cli.main import in_words, refuse
from kvfold.cli.options import converted
from kvfold.cli.paths import check_paths


def run(command: Callable[..., None], arguments: Sequence[str] | None = None) -> int:
    """Run `command` with `arguments` (default: the process's own); returns the exit code, 2 for a
    user's mistake, which is one line on stderr."""
    app = App(
        name=f"bench_{command.__name__}.py",
        help_format="plaintext",
        version_flags=[],
        default_parameter=Parameter(converter=converted),
    )
    app.default(command)
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        call, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        check_paths(bound)
        call(*bound.args, **bound.kwargs)
    except (CycloptsError, ValueError, OSError) as error:
        return refuse(in_words(error))
    return 0
