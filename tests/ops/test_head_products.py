"""Products of heads: the right ones, and weights that a decode step reads in place."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.ops.common.head_products import up_project


class Sizes(TorchDispatchMode):
    """Numbers of each copy that PyTorch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
            self.copies.append(result.numel())
        return result


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (5, 1), (1, 7), (2, 3)])
def test_each_head_is_multiplied_with_its_kv_heads_weight(batch: int, tokens: int) -> None:
    x, weight = torch.randn(batch, 6, tokens, 8), torch.randn(2, 4, 8)
    each: list[Tensor] = [x[:, i] @ weight[i // 3].T for i in range(6)]
    expected = torch.stack(each, 2).unflatten(2, (2, 3))
    torch.testing.assert_close(up_project(x, weight), expected)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_decode_step_copies_no_weights(batch: int) -> None:
    x, weight = torch.randn(batch, 6, 1, 8), torch.randn(2, 400, 8)
    with Sizes() as seen:
        up_project(x, weight)
    assert max(seen.copies, default=0) < weight.numel()
