"""KVgrad (openreview.net/forum?id=cg1wTCJjjk): attention in a re-scoring pass, weighted by the
gradient of the last hidden states. Experimental, because it reads a context twice more, once with
gradients, in plain PyTorch.

Shapes: n tokens of the re-scoring pass.
"""

from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvfold.cache.eviction.scorers.rescoring import Rescoring
from kvfold.models.families import family_of
from kvfold.utils.versions import cache_argument


class KVgrad(Rescoring):
    """The maximum attention in a re-scoring pass, times the norm of W_O v, times the norm of the
    gradient of sum_p |h_p|^2 by the attention output of the querying token; h: the last layer's
    hidden states before the norm."""

    gradient_weighted: ClassVar[bool] = True

    def gradient_norms(
        self, model: Any, tokens: Tensor, positions: Tensor, context: Any
    ) -> list[Tensor]:
        """|dPhi / da_p| of every layer: a is what its attention adds to token p, Phi the sum of
        |h_p|^2 over the tokens of the pass."""
        family = family_of(model.config)
        outputs: list[Tensor] = []

        def append(_: nn.Module, __: Any, output: Any) -> None:
            outputs.append(output[0] if isinstance(output, tuple) else output)

        def start_gradient(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return output.detach().requires_grad_()

        # Tensors made in inference mode never have gradients.
        with ExitStack() as hooks, torch.inference_mode(False), torch.enable_grad():
            embeddings = model.get_input_embeddings()
            hooks.callback(embeddings.register_forward_hook(start_gradient).remove)
            for module in (*family.attentions(model), family.layers(model)[-1]):
                hooks.callback(module.register_forward_hook(append).remove)
            model.base_model(
                input_ids=tokens.clone()[None],
                position_ids=positions.clone()[None],
                **cache_argument(context),
                use_cache=False,
            )
            *added, last = outputs
            largest = last.detach().abs().amax().clamp(min=torch.finfo(last.dtype).tiny)
            # Divided by the largest, because fp16 ends at 65504.
            gradients = torch.autograd.grad(last, added, last.detach() / largest)
        scale = 2 * largest.float()
        return [scale * torch.linalg.vector_norm(x.float(), dim=-1) for x in gradients]
