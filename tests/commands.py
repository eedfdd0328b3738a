"""kvfold's commands, run in this process."""

from kvfold.cli.main import main


def refused(capsys, *arguments) -> str:
    """The one line on stderr of a command that must end with code 2."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("kvfold: error: ")
    return lines[0]
