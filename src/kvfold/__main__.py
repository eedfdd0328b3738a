"""python -m kvfold: the command line."""

import sys


def run() -> int:
    """As `kvfold.cli.main.main`, while whose modules load an interrupt is one line, too."""
    try:
        from kvfold.cli.main import main
    except KeyboardInterrupt:
        print("kvfold: interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
