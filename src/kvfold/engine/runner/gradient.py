"""How much a model's last hidden states depend on what every layer's attention adds to a token."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.replay import ReplayWithGradients
from kvfold.models.families import family_of
from kvfold.utils.versions import given


def gradient_norms(
    model: Any, tokens: Tensor, positions: Tensor, context: ReplayWithGradients
) -> list[Tensor]:
    """|dPhi / da_p| fp32 [1, n] of every layer: a is what its attention adds to token p, Phi the
    sum of |h_p|^2 over the tokens, h the last layer's outputs before the norm (KVgrad).

    model: in plain PyTorch; its weights get no gradients. tokens, positions int64 [n].
    """
    family = family_of(model.config)
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    def begin(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_()

    # What was made in inference mode has no gradients for good.
    with ExitStack() as hooks, torch.inference_mode(False), torch.enable_grad():
        hooks.callback(model.get_input_embeddings().register_forward_hook(begin).remove)
        for module in (*family.attentions(model), family.layers(model)[-1]):
            hooks.callback(module.register_forward_hook(keep).remove)
        model.base_model(
            input_ids=tokens.clone()[None],
            position_ids=positions.clone()[None],
            **given(context),
            use_cache=False,
        )
        *added, last = kept
        largest = last.detach().abs().amax().clamp(min=torch.finfo(last.dtype).tiny)
        found = torch.autograd.grad(last, added, last.detach() / largest)  # half's ends at 65504
    whole = 2 * largest.float()
    return [whole * torch.linalg.vector_norm(x.float(), dim=-1) for x in found]
