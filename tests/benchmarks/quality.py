"""What narrow types cost in quality: perplexity on an English text, beside fp32.

    .venv/bin/python -m tests.benchmarks.quality --model DIR

The text (default: this repository's README and change notes) is cut into windows; every token of a window
but the first is predicted from those before it. Beside the perplexity stand the mean Kullback-Leibler
divergence of the predicted distributions from those of the first line, and how often both hold the same
token likeliest.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.attention.select import select_backend
from headrace.engine.batch import build_batch
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.host import prepare_host
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.benchmarks.options import add_model_options, model_path

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """How a model is loaded."""

    dtype: str
    weight_dtype: str

    def __str__(self) -> str:
        return self.dtype if self.weight_dtype == "same" else f"{self.dtype}, {self.weight_dtype} weights"


VARIANTS = (
    Variant("float32", "same"),
    Variant("bfloat16", "same"),
    Variant("float32", "int8"),
    Variant("bfloat16", "int8"),
    Variant("float32", "int4"),
    Variant("bfloat16", "int4"),
)


def log_probs_of(decoder: Decoder, token_ids: list[int]) -> Tensor:
    """What the model says of each next token: (tokens - 1, V)."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    storage = KVStorage(CacheLayout(num_blocks + 1, BLOCK_SIZE), decoder.kv_shape, decoder.device)
    row = ScheduledSequence(
        sequence_id=SequenceId(0),
        first_position=0,
        token_ids=tuple(token_ids),
        num_draft_tokens=0,
        block_ids=tuple(range(1, num_blocks + 1)),
        is_sampled=True,
        sampling=SamplingParams(temperature=0.0),
    )
    batch = build_batch(StepPlan(0, (row,)), BLOCK_SIZE)
    step = select_backend("auto", storage).begin_step(batch.attention)
    wanted = torch.arange(len(token_ids) - 1)
    return decoder.forward(batch.input_ids, batch.positions, step, wanted).log_softmax(dim=-1)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_options(parser)
    parser.add_argument("--text", type=Path, nargs="*", default=[ROOT / "README.md", ROOT / "CHANGELOG.md"])
    parser.add_argument("--window", type=int, default=512, help="tokens that are predicted together")
    parser.add_argument("--max-windows", type=int, default=12)
    options = parser.parse_args()
    prepare_host(None)
    folder = model_path(options)
    text = "\n".join(path.read_text(encoding="utf-8") for path in options.text)
    token_ids = load_tokenizer(folder).encode(text, add_special_tokens=False)
    windows = [token_ids[i : i + options.window] for i in range(0, len(token_ids) - 1, options.window)]
    windows = [window for window in windows if len(window) > 1][: options.max_windows]
    num_predicted = sum(len(window) - 1 for window in windows)
    print(f"{num_predicted} tokens of {', '.join(path.name for path in options.text)}")
    print(f"{'':28s} {'perplexity':>10s} {'to the first':>12s} {'divergence':>10s} {'same token':>10s}")
    reference: list[tuple[Tensor, Tensor]] = []
    first_loss = 0.0
    for variant in VARIANTS:
        config = ModelConfig(folder, dtype=variant.dtype, weight_dtype=variant.weight_dtype)
        decoder = load_decoder(config, torch.device("cpu")).decoder
        loss = divergence = same = 0.0
        for place, window in enumerate(windows):
            told = log_probs_of(decoder, window)
            if variant == VARIANTS[0]:
                reference.append((told.half(), told.argmax(-1)))
            wanted, likeliest = reference[place][0].float(), reference[place][1]
            loss -= float(told.gather(1, torch.tensor(window[1:])[:, None]).sum())
            divergence += float((wanted.exp() * (wanted - told)).sum())
            same += float((likeliest == told.argmax(-1)).sum())
        loss /= num_predicted
        first_loss = first_loss or loss
        perplexity = torch.tensor(loss).exp().item()
        ratio = torch.tensor(loss - first_loss).exp().item()
        print(
            f"{variant!s:28s} {perplexity:10.3f} {ratio:11.4f}x {divergence / num_predicted:10.5f} "
            f"{same / num_predicted:9.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
