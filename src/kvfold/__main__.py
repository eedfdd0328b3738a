"""The command line: `kvfold`, or `python -m kvfold`."""

import atexit
import gc
import sys


def run() -> int:
    """Run `kvfold.cli.main.main`. An interrupt while modules load also prints only one line."""
    # Otherwise Python's last garbage collection visits all of torch, which takes a second.
    atexit.register(gc.freeze)
    try:
        from kvfold.cli.main import main
    except KeyboardInterrupt:
        print("kvfold: interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
