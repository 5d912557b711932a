"""Greedy output held against a reference model, where types and kernels differ in the last bits.

Two likely tokens may change places by rounding, and from then on the texts have nothing in common. So every
token is judged after the very tokens that were put out before it: it must be as likely as the best, but for a
margin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


@torch.inference_mode()
def assert_greedy(
    reference: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], margin: float
) -> None:
    """Fail unless each token of `output` has, for the reference, a logit within `margin` of the highest.

    Args:
        reference: on any device, in any type; fp32 is judge enough.
        output: what was made of `prompt`, the prompt not included.
    """
    token_ids = torch.tensor([[*prompt, *output]], device=reference.device)
    logits = reference(token_ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, token_ids[0, len(prompt) :, None])[:, 0]
    behind = logits.amax(dim=-1) - chosen
    assert behind.shape[0] == len(output)
    worst = int(behind.argmax())
    assert float(behind[worst]) <= margin, (
        f"token {worst} of the output is {float(behind[worst]):.3f} behind the likeliest one"
    )
