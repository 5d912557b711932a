"""transformers' `generate` in fixed batches.   usage: transformers_worker.py MODEL_FOLDER BATCH DTYPE

A batch runs until its longest answer is done. An answer's last token counts when it is made, as if it were
streamed.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

PAD = 2


class Clock(LogitsProcessor):
    """Notes when the logits of each token are there."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return scores


def main() -> None:
    """Serve lines until standard input ends."""
    folder, size, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    batch(model, [([1, 2, 3], 4)] * 2)
    print("[]", flush=True)
    for line in sys.stdin:
        requests = json.loads(line)
        began_s = time.perf_counter()
        timings = []
        for start in range(0, len(requests), size):
            part = requests[start : start + size]
            times_s = batch(model, part)
            timings += [[times_s[0] - began_s, times_s[length] - began_s, length] for _, length in part]
        print(json.dumps(timings), flush=True)


def batch(model: PreTrainedModel, requests: list[tuple[list[int], int]]) -> list[float]:
    """Times of the first token and of each token's end: token n is there when the step after it begins."""
    width = max(len(prompt) for prompt, _ in requests)
    length = max(wanted for _, wanted in requests)
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    clock = Clock()
    with torch.inference_mode():
        made = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=PAD,
            logits_processor=LogitsProcessorList([clock]),
        )
    if made.shape[1] != width + length:
        raise RuntimeError(f"made {made.shape[1] - width} tokens where {length} were asked for")
    # times_s[n - 1] is when the n-th token's logits were there.
    return [clock.times_s[0], *clock.times_s]


if __name__ == "__main__":
    main()
