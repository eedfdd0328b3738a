"""Keep the last tokens of every sequence as the model computed them, beside their compressed
entries.

Shapes: S slots, G groups of all layers (one per KV head), N tokens of a window; n pages of a slot
in a group; M tokens, Hk KV heads, d / dv head dims of keys / values, R numbers of an entry. The
token at position p is entry p % N of its slot, so nothing moves as a sequence goes on.
"""

import torch
from torch import Tensor

from kvfold.layout.pages import UNIT, CacheLayout
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.recording import copy


class WindowPages:
    """Rings of the last N = `tokens` tokens of S sequences, in pages that belong to their slots.

    layout: of unquantised keys and values.
    arena: uint8, never initialised. block_tables: int32 [S, G, n], constant.
    lengths: int32 [S, G], entries that decoding reads, which `attention.window` updates.
    first: int64 [S], position of the first token that a sequence computed itself. Those before it
        came with shared pages, and are in no ring.
    """

    def __init__(
        self, layout: CacheLayout, tokens: int, num_slots: int, device: torch.device
    ) -> None:
        self.layout, self.tokens, self.device = layout, tokens, device
        num_pages, units = -(-tokens // layout.page), layout.page_bytes // UNIT
        sizes = torch.tensor([group.layout.page_units for group in layout.groups])
        starts = (sizes.cumsum(0) - sizes)[:, None] + torch.arange(num_pages) * units
        slots = torch.arange(num_slots)[:, None, None] * (num_pages * units)
        self.num_bytes = num_slots * num_pages * layout.page_bytes
        self.arena = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.block_tables = (slots + starts).int().to(device)
        self.lengths = torch.zeros(self.block_tables.shape[:2], dtype=torch.int32, device=device)
        self.first = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def pages(self, layer: int) -> LayerPages:
        """The pages of a layer, in the form that ops take."""
        where = self.layout.layer_groups[layer]
        tables, lengths = self.block_tables[:, where], self.lengths[:, where]
        return LayerPages(self.arena, tables, lengths, self.layout.groups_of_layer(layer))


def entries_of(keys: Tensor, values: Tensor) -> Tensor:
    """Entries [M, R] of the keys [Hk, M, d] and values [Hk, M, dv] of M tokens."""
    parts = keys.transpose(0, 1), values.transpose(0, 1)
    widths = [x[0].numel() for x in parts]
    entries = keys.new_empty(keys.shape[1], sum(widths))
    for column, part in zip(entries.split(widths, 1), parts, strict=True):
        copy(column.view(part.shape), part)
    return entries
