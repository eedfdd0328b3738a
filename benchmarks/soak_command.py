"""The command line of a soak: flags of its plan, its report as JSON, 1 where anything was wrong."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

P = TypeVar("P")


def run_command(what: str, kind: type[P], soak: Callable[[P], dict[str, Any]]) -> int:
    """what: the soak, in a sentence; kind: of its plan, a dataclass whose fields all have defaults.
    Returns the exit code."""
    parser = argparse.ArgumentParser(description=what)
    for name, value in vars(kind()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json", type=Path)
    words = vars(parser.parse_args())
    path = words.pop("json")
    report = soak(kind(**words))
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in report.items() if k != "samples"}, indent=1))
    return 1 if report["wrong"] else 0
