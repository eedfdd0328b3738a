"""Whether two versions of the source compile to the same kernels, by kernel and tuning.

Triton keeps what it compiled in TRITON_CACHE_DIR. Run the same tests with both versions, each with
a folder of its own and TRITON_DISABLE_LINE_INFO=1, then:

    python tools/kernel_code.py BEFORE AFTER

Compared is PTX without comments, line numbers and the modules in mangled names. Ends with 1 where a
kernel of one side is not among the other's.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
Code = dict[str, str]  # hash of the text: how it was tuned


def kernels(cache: Path) -> dict[str, Code]:
    """Every kernel's different codes."""
    found: dict[str, Code] = defaultdict(dict)
    for path in cache.rglob("*.ptx"):
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        code = hashlib.sha256(plain(path.read_text(encoding="utf-8")).encode()).hexdigest()
        found[path.stem][code] = ", ".join(f"{x}={about.get(x)}" for x in OPTIONS)
    return found


def plain(ptx: str) -> str:
    """PTX without what a moved function changes."""
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.splitlines())
    kept = [line for line in lines if line and not line.startswith((".loc", ".file"))]
    return re.sub(r"kvfold[a-z_.]*", "kvfold", "\n".join(kept))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    before, after = kernels(arguments.before), kernels(arguments.after)
    different = 0
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, {}), after.get(name, {})
        print(f"{name}: {len(old)} codes before, {len(new)} after, {len(old.keys() & new)} equal")
        for side, own, others in (("before", old, new), ("after", new, old)):
            for code in own.keys() - others:
                print(f"    only {side}: {own[code]} ({code[:12]})")
                different += 1
    total = sum(len(codes) for codes in before.values())
    print(f"{len(before)} kernels, {total} codes, {different} of one side alone")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
