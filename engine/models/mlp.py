"""The second half of a layer: one gated MLP for all tokens, or a mixture of experts.

Letters: T tokens of the step, K width of the residual stream, N inner width, E experts, S selected ones per
token, P pairs of a token and one of its experts, T * S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

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


class Experts(Protocol):
    """The MLPs of a mixture, over tokens that are grouped by expert."""

    def __call__(self, inputs: Tensor, counts: Tensor) -> Tensor:
        """Put each token through its expert.

        Args:
            inputs: (P, K): the first expert's tokens, then the second's, and so on.
            counts: (E,), int64: how many each expert has; none, for some.

        Returns:
            (P, K).
        """
        ...


class SeparateExperts:
    """One after the other, for a CPU: each has its weights laid out for itself."""

    def __init__(self, experts: Sequence[GatedMlp]) -> None:
        self._experts = experts

    def __call__(self, inputs: Tensor, counts: Tensor) -> Tensor:
        """See `Experts`; an expert that nobody chose computes nothing."""
        grouped = torch.split(inputs, counts.tolist())
        return torch.cat(
            [
                expert(tokens)
                for expert, tokens in zip(self._experts, grouped, strict=True)
                if tokens.shape[0] > 0
            ]
        )


class GroupedExperts:
    """All in one product, for a GPU: how many tokens each has stays there, and nobody waits for it."""

    def __init__(self, gate_up: Tensor, down: Tensor, gate: Gate) -> None:
        """Put it together.

        Args:
            gate_up: (E, 2 * N, K).
            down: (E, K, N).
        """
        self._gate_up, self._down, self._gate = gate_up.transpose(1, 2), down.transpose(1, 2), gate

    def __call__(self, inputs: Tensor, counts: Tensor) -> Tensor:
        """See `Experts`."""
        ends = counts.cumsum(0, dtype=torch.int32)
        inner: Tensor = self._gate(F.grouped_mm(inputs, self._gate_up, offs=ends))
        outputs: Tensor = F.grouped_mm(inner, self._down, offs=ends)
        return outputs


class Router:
    """Chooses each token's experts, by the token alone.

    The usual libraries sum in another order for another number of rows. In their last digit two experts may
    change places, and with that far more than a last digit changes. So the sums are made in double precision
    and rounded once: an order of summing shows in them only if the sum lies within 1e-16 of where fp32 rounds
    the other way.
    """

    def __init__(self, spec: ExpertsSpec, weight: Tensor) -> None:
        """Put it together.

        Args:
            weight: (E, K).
        """
        self._spec, self._weight = spec, weight.double()

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Choose.

        Args:
            inputs: (T, K).

        Returns:
            Weight and number of the experts of each token: (T, S), dtype of `inputs`; (T, S), int64.
        """
        logits = F.linear(inputs.double(), self._weight).to(inputs.dtype)
        probs = logits.float().softmax(dim=-1)
        weights, chosen = probs.topk(self._spec.num_selected, dim=-1)
        if self._spec.is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(inputs.dtype), chosen


class MixtureOfExperts:
    """Each token goes through a few of many MLPs, chosen by a router (arXiv 1701.06538, 2401.04088).

    Tokens are grouped by expert, so that an expert computes all its tokens in one product. A token's outputs
    are summed in the router's order, whoever shares the step.
    """

    def __init__(self, spec: ExpertsSpec, router: Router, experts: Experts) -> None:
        self._spec, self._router, self._experts = spec, router, experts

    def __call__(self, inputs: Tensor) -> Tensor:
        """See `Linear`."""
        num_tokens, width = inputs.shape
        num_selected = self._spec.num_selected
        weights, chosen = self._router(inputs)
        # Places of (token, choice) pairs, T * S of them, ordered by expert and within one by token.
        experts_of_pairs = chosen.flatten()
        pairs = experts_of_pairs.argsort(stable=True)
        # torch.bincount would have a GPU wait to learn how long its result is.
        counts = experts_of_pairs.new_zeros(self._spec.count)
        counts.scatter_add_(0, experts_of_pairs, torch.ones_like(experts_of_pairs))
        outputs = self._experts(inputs.index_select(0, pairs // num_selected), counts)
        by_pair = torch.empty_like(outputs)
        by_pair[pairs] = outputs
        return (by_pair.view(num_tokens, num_selected, width) * weights[:, :, None]).sum(dim=1)

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """See `Linear`."""
        return self(inputs).add_(residual)
