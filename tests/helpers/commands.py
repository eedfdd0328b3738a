"""kvfold's commands, run in this process."""

from kvfold.cli.main import main

PROGRESS = ("loading ", "calibrating on ")  # what a command says of work that takes long


OLD = " is now written --set "  # a hint that tests of other things need not care about


def without_progress(err: str) -> list[str]:
    """The lines of a command's stderr beside progress and hints at old flags."""
    lines = (line for line in err.splitlines() if OLD not in line)
    return [line for line in lines if not line.startswith(PROGRESS)]


def refused(capsys, *arguments) -> str:
    """The one line on stderr, beside progress, of a command that must end with code 2."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    lines = without_progress(capsys.readouterr().err)
    assert len(lines) == 1 and lines[0].startswith("kvfold: error: ")
    return lines[0]
