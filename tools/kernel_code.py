"""Whether two versions of the source compile to the same kernels, by kernel and tuning.

Triton keeps what it compiled in TRITON_CACHE_DIR. Run the same tests with both versions, each with
a folder of its own and TRITON_DISABLE_LINE_INFO=1, then:

    python tools/kernel_code.py BEFORE AFTER

A kernel's input is the IR it enters the compiler with: its text with types, constants and what is
known of its arguments; its code is PTX. Both are compared without line numbers and names of
modules. The compiler itself orders independent instructions one way or another from run to run, so
codes of one input count as equal if they are the same instructions in another order of registers.
Ends with 1 where an input or the code of one is on one side alone.
"""

import argparse
import re
import sys
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

Inputs = dict[str, set[str]]  # hash of an input: its different codes


def kernels(cache: Path) -> dict[str, Inputs]:
    """By kernel, what was compiled."""
    found: dict[str, Inputs] = defaultdict(lambda: defaultdict(set))
    for path in cache.rglob("*.ptx"):
        source = plain(path.with_suffix(".source").read_text(encoding="utf-8"))
        code = plain(path.read_text(encoding="utf-8"))
        found[path.stem][sha256(source.encode()).hexdigest()].add(code)
    return found


def plain(text: str) -> str:
    """Without comments, line numbers and modules, which a moved function changes."""
    text = re.sub(r"kvfold\.(?:[a-z_0-9]+\.)+", "", re.sub(r"//.*| ?loc\([^)]*\)", "", text))
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(x for x in lines if x and not x.startswith((".loc", ".file", "#loc")))


def unordered(code: str) -> list[str]:
    """Instructions without the numbers of registers and labels, sorted."""
    return sorted(re.sub(r"(%[a-z]+|L__BB)[0-9_]+", r"\1", code).splitlines())


def differs(before: set[str], after: set[str]) -> bool:
    """Whether an input has no code in common."""
    common = before & after or [x for x in before for y in after if unordered(x) == unordered(y)]
    return not common


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    before, after = kernels(arguments.before), kernels(arguments.after)
    alone = different = reordered = total = 0
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, {}), after.get(name, {})
        both = old.keys() & new.keys()
        changed = [x for x in both if differs(old[x], new[x])]
        moved = sum(not old[x] & new[x] for x in both) - len(changed)
        print(
            f"{name}: inputs {len(old)} before, {len(new)} after, {len(both)} of both; of these"
            f" {len(changed)} differ in code, {moved} in its order alone"
        )
        alone += len(old.keys() ^ new.keys())
        different, reordered = different + len(changed), reordered + moved
        total += len(both)
    print(
        f"{len(before)} kernels: {total} inputs of both, {different} with another code, {reordered}"
        f" in another order; {alone} inputs of one side alone"
    )
    return int(different > 0 or alone > 0)


if __name__ == "__main__":
    sys.exit(main())
