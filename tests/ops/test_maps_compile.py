"""The kernel of maps around attention compiled for sm_90a: wide asynchronous loads, tensor cores,
nothing spills.

As in `test_decode_compile`, what is compiled is what a launch would be.
"""

import json
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from decode_compile_cases import SHARED, Recorder, operations  # noqa: E402
from hopper import need_compiler, registers, run_alone  # noqa: E402
from kvfold.ops.maps import EntryMaps, OutputMaps  # noqa: E402
from kvfold.ops.maps import triton as maps_triton  # noqa: E402

DTYPE = torch.bfloat16


class Launch(Recorder):
    """What a launch knows of its integers: 16 divides strides, nothing else is known."""

    def __call__(self, *args: Any, **constants: Any) -> None:
        super().__call__(*args, **constants)
        # Both operands of a product are loaded ahead.
        numbers = constants["DEPTH"] * (constants["COLUMNS"] + constants["TOKENS"])
        self.buffers = 2 * numbers * (constants["STAGES"] - 1)
        told = [not x.do_not_specialize for x in self.kernel.params]
        self.source.attrs = {at: x for at, x in self.source.attrs.items() if told[at[0]]}


def around(tokens: int, heads: int, d: int, key: int, value: int) -> dict[str, Launch]:
    """Both launches of a layer whose KV heads, of four query heads each, share one value latent."""
    entry = EntryMaps(
        key_up=torch.zeros(heads, d, key, dtype=DTYPE),
        key_down=torch.zeros(heads, d, key, dtype=DTYPE),
        key_shift=torch.zeros(heads, key, dtype=DTYPE),
        value_down=torch.zeros(1, heads * d, value, dtype=DTYPE),
        value_shift=torch.zeros(1, value, dtype=DTYPE),
        key_ranks=(key,) * heads,
        value_ranks=(value,),
        head_dim=d,
        queries=4,
    )
    output = OutputMaps(
        value_up=torch.zeros(heads, d, value, dtype=DTYPE),
        mean=torch.zeros(heads, d, dtype=DTYPE),
        ranks=(value,) * heads,
        queries=4,
    )
    for maps, pack in ((entry, maps_triton.pack_entries), (output, maps_triton.pack_outputs)):
        object.__setattr__(maps, "packed", pack(maps))
    sizes = [4 * heads * d, heads * d, heads * d]
    parts = torch.zeros(tokens, sum(sizes), dtype=DTYPE).split(sizes, 1)
    out = torch.zeros(tokens, 4 * heads, 1, value, dtype=DTYPE)
    entries, outputs = (Launch(maps_triton.maps_kernel) for _ in range(2))
    known = {"launch_options": lambda _: {"PDL": True, "launch_pdl": True}}
    with mock.patch.multiple(maps_triton, maps_kernel=entries, **known):
        maps_triton.score_space(entry, *(x.unflatten(1, (-1, d)) for x in parts))
    with mock.patch.multiple(maps_triton, maps_kernel=outputs, **known):
        maps_triton.outputs(output, out)
    return {"entries": entries, "outputs": outputs}


def compile_all() -> None:
    for tokens, *shape in ((1, 8, 128, 64, 704), (64, 8, 128, 64, 704), (64, 2, 80, 56, 120)):
        for name, launch in around(tokens, *shape).items():
            listing, shared = launch.compiled()
            names, _ = operations(listing)
            kinds = {"copies": "LDGSTS", "loads": "LDG.", "products": "HMMA"}
            found = {kind: [x for x in names if x.startswith(y)] for kind, y in kinds.items()}
            report = {
                "what": f"{name}, {tokens} tokens, {shape}",
                "registers": registers(listing),
                "spills": sum(x.startswith(("STL", "LDL")) for x in names),
                "early": sum(x.startswith(("ACQBULK", "PREEXIT")) for x in names),
                "wide": all(".128" in x for x in found["copies"]),
                "shared": shared,
                "wanted": launch.buffers,
            }
            print(json.dumps(report | {x: len(y) for x, y in found.items()}), flush=True)


def test_the_kernel_compiles_well_for_hopper() -> None:
    need_compiler()
    reports = [json.loads(line) for line in run_alone(__file__)]
    assert len(reports) == 6
    for report in reports:
        assert not report["spills"] and report["registers"] <= 128, report
        assert report["shared"] == report["wanted"] <= SHARED // 2, report
        assert report["products"] and report["early"] == 2, report
        assert report["copies"] and report["wide"], report


if __name__ == "__main__":
    compile_all()
