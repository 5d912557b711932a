"""Reads the draft model, and puts it beside the one that it drafts for."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.config import CacheLayout, EngineConfig, ModelInfo
from headrace.engine.errors import ConfigError, ModelLoadError
from headrace.engine.kv.storage import KVShape
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder, read_spec
from headrace.engine.models.reduced_head import read_reduced_head
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.placement import Placement
from headrace.engine.runner.protocol import LoadProgress
from headrace.engine.speculative.draft_model import DraftModel
from headrace.engine.speculative.vocabulary import num_common_ids
from headrace.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model whose weights are in place, and whose vocabulary is the target's.

    Args:
        num_common_ids: see `headrace.engine.speculative.vocabulary`.
        target_size: rows of the target's vocabulary.
        vocabulary: (C,): the tokens of its reduced head; None where it has none.
    """

    decoder: Decoder
    info: ModelInfo
    placement: Placement
    num_common_ids: int
    target_size: int
    vocabulary: Tensor | None = None

    @property
    def kv_shape(self) -> KVShape:
        """K and V of one of its tokens."""
        return self.placement.shape

    def build(self, layout: CacheLayout) -> DraftModel:
        """Give it a KV pool behind the target's block ids."""
        return DraftModel(
            self.decoder,
            self.placement.build_attention(layout),
            block_size=layout.block_size,
            vocab_size=self.target_size,
            num_common_ids=self.num_common_ids,
            vocabulary=self.vocabulary,
        )


def load_draft(
    config: EngineConfig,
    device: torch.device,
    target: ModelInfo,
    tokenizer: Tokenizer,
    progress: LoadProgress | None = None,
) -> LoadedDraft | None:
    """Read the draft model that the configuration names; None where it names none.

    Args:
        target, tokenizer: of the model that it drafts for.

    Raises:
        ModelLoadError: its files can't be served.
        ConfigError: its vocabulary is another one.
    """
    path = config.speculation.draft_model
    if path is None:
        return None
    _, spec = read_spec(path)
    common = _check_vocabulary(path, spec.vocab_size, target, tokenizer)
    head = read_reduced_head(path, spec)
    if head is not None:
        head = head.below(common)
        if not head.token_ids.numel():
            raise ConfigError(
                f"the draft model {path.name} proposes no token that the model has: use another one, or none"
            )
    model = replace(
        config.model,
        path=path,
        name="",
        weight_dtype=config.speculation.draft_weight_dtype,
        max_model_len=None,
        cuda_graphs=False,
    )
    loaded = load_decoder(model, device, progress, reduced_head=head)
    decoder, info = loaded.decoder, loaded.info
    placement = Placement(replace(config, model=model), decoder, info.max_model_len)
    logger.info(
        "draft model %s: %s, %.1f million parameters, %d of %d tokens in common, %d of them proposed, "
        "up to %d tokens of a text",
        info.name,
        info.family,
        info.num_parameters / 1e6,
        common,
        target.vocab_size,
        common if head is None else head.token_ids.numel(),
        info.max_model_len,
    )
    vocabulary = None if head is None else head.token_ids.to(device)
    return LoadedDraft(decoder, info, placement, common, target.vocab_size, vocabulary)


def _check_vocabulary(path: Path, vocab_size: int, target: ModelInfo, tokenizer: Tokenizer) -> int:
    """How many ids are common; found before the weights are read."""
    try:
        draft_tokenizer = load_tokenizer(path)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"the draft model in {path} needs a tokenizer, by which its vocabulary is compared with the "
            f"model's: {error}"
        ) from error
    return num_common_ids(tokenizer, target.vocab_size, draft_tokenizer, vocab_size, path.name)
