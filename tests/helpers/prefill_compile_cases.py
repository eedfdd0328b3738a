"""What tests of prefill compile share with others."""

import re
from typing import Any

from decode_compile_cases import Recorder

SPILLS = 24  # outside of loops: once a tile of queries, not once a tile of rows


class Launch(Recorder):
    """Of a kernel that is told nothing of its integers, which hold for launches of all kinds."""

    def __call__(self, *args: Any, **constants: Any) -> None:
        super().__call__(*args, **constants)
        told = [not x.do_not_specialize for x in self.kernel.params]
        self.source.attrs = {at: x for at, x in self.source.attrs.items() if told[at[0]]}


def hot_loop(names: list[str], labels: dict[str, int]) -> list[str]:
    """The shortest loop that multiplies matrices by warp group."""
    loops = []
    for end, name in enumerate(names):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", name)
        if target and labels.get(target[1], end + 1) <= end:
            body = [re.split(r"[. ]", x)[0] for x in names[labels[target[1]] : end]]
            loops += [body] if "HGMMA" in body else []
    return min(loops, key=len, default=[])
