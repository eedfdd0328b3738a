"""python -m kvfold: the command line."""

import atexit
import gc
import sys


def run() -> int:
    """As `kvfold.cli.main.main`, while whose modules load an interrupt is one line, too."""
    # At the end, or Python's last collection goes through all of torch: a second of a core.
    atexit.register(gc.freeze)
    try:
        from kvfold.cli.main import main
    except KeyboardInterrupt:
        print("kvfold: interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
