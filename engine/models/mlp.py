"""The second half of a layer: one gated MLP for all tokens, or a mixture of experts.

Letters: T tokens of the step, K width of the residual stream, N inner width, E experts, S selected ones per
token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.models.layers import Linear, gated_gelu, gated_silu
from headrace.engine.models.spec import Activation, ExpertsSpec

Gate = Callable[[Tensor], Tensor]
"""From the gate's half and the other, (T, 2 * N), to their product, (T, N)."""

GATES: Mapping[Activation, Gate] = {
    Activation.SILU: gated_silu,
    Activation.GELU: partial(gated_gelu, tanh=False),
    Activation.GELU_TANH: partial(gated_gelu, tanh=True),
}


class GatedMlp:
    """``down(act(gate(x)) * up(x))``, with both projections of the input as one. Takes a `Linear`'s place."""

    def __init__(self, gate_up: Linear, down: Linear, gate: Gate) -> None:
        """Put it together.

        Args:
            gate_up: from K to 2 * N.
            down: from N to K.
        """
        self._gate_up, self._down, self._gate = gate_up, down, gate

    @property
    def parts(self) -> tuple[Linear, Linear, Gate]:
        """Both projections of the input, the projection back, and what is between them."""
        return self._gate_up, self._down, self._gate

    def __call__(self, inputs: Tensor) -> Tensor:
        """See `Linear`."""
        return self._down(self._gate(self._gate_up(inputs)))

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """See `Linear`."""
        return self._down.add_to(residual, self._gate(self._gate_up(inputs)))


class MixtureOfExperts:
    """Each token goes through a few of many MLPs, chosen by a router (arXiv 1701.06538, 2401.04088).

    Tokens are grouped by expert, so that an expert computes all its tokens in one product and one that nobody
    chose computes nothing. A token's outputs are summed in the router's order, whoever shares the step.
    """

    def __init__(self, spec: ExpertsSpec, router: Tensor, experts: Sequence[GatedMlp]) -> None:
        """Put it together.

        Args:
            router: (E, K).
            experts: E of them.
        """
        self._spec, self._router, self._experts = spec, router, experts

    def __call__(self, inputs: Tensor) -> Tensor:
        """See `Linear`."""
        num_tokens, width = inputs.shape
        num_selected = self._spec.num_selected
        weights, chosen = self._route(inputs)
        # Places of (token, choice) pairs, T * S of them, ordered by expert and within one by token.
        experts_of_pairs = chosen.flatten()
        pairs = experts_of_pairs.argsort(stable=True)
        counts = torch.bincount(experts_of_pairs, minlength=self._spec.count).tolist()
        grouped = torch.split(inputs.index_select(0, pairs // num_selected), counts)
        outputs = [
            expert(tokens)
            for expert, tokens in zip(self._experts, grouped, strict=True)
            if tokens.shape[0] > 0
        ]
        by_pair = torch.empty((num_tokens * num_selected, width), dtype=inputs.dtype, device=inputs.device)
        by_pair[pairs] = torch.cat(outputs)
        return (by_pair.view(num_tokens, num_selected, width) * weights[:, :, None]).sum(dim=1)

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """See `Linear`."""
        return self(inputs).add_(residual)

    def _route(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and number of the experts of each token: (T, S), dtype of `inputs`; (T, S), int64."""
        probs = F.linear(inputs, self._router).float().softmax(dim=-1)
        weights, chosen = probs.topk(self._spec.num_selected, dim=-1)
        if self._spec.is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(inputs.dtype), chosen
