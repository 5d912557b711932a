"""From a configuration to a model that is ready to run: weights, KV pool, attention, tokenizer, warm-up."""

from __future__ import annotations

import logging
import time

import torch

from headrace.engine.attention.select import select_backend
from headrace.engine.config import EngineConfig
from headrace.engine.kv.storage import KVShape, KVStorage, available_memory, resolve_layout
from headrace.engine.models.loader import load_decoder, read_spec
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.host import prepare_host
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.runner.protocol import LoadedModel, LoadProgress

logger = logging.getLogger(__name__)

_WARMING_UP = "warming up"


def load(config: EngineConfig, progress: LoadProgress | None = None) -> LoadedModel:
    """See `headrace.engine.loading.load_model`."""
    started_s = time.monotonic()
    prepare_host(config.num_threads)
    device = torch.device("cpu")
    # First, so that no fault of the folder or its config.json is blamed on the tokenizer.
    read_spec(config.model.path)
    tokenizer = load_tokenizer(config.model.path)
    loaded = load_decoder(config.model, device, progress, tokenizer_eos_token_ids=tokenizer.eos_token_ids)
    decoder, info = loaded.decoder, loaded.info
    spec = decoder.spec
    shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, decoder.dtype)
    layout = resolve_layout(
        config.cache,
        shape,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=info.max_model_len,
        available_bytes=available_memory(device),
    )
    storage = KVStorage(layout, shape, device)
    runner = ModelRunner(decoder, select_backend(config.model.attention_backend, storage), layout)
    longest = min(config.scheduler.max_num_batched_tokens, info.max_model_len)
    if progress is not None:
        progress(_WARMING_UP, 0, 1)
    runner.warm_up(num_prefill_tokens=longest, num_decode_rows=config.scheduler.max_num_seqs)
    if progress is not None:
        progress(_WARMING_UP, 1, 1)
    logger.info(
        "model %s ready after %.1f s: %s, %.1f million parameters, %s",
        info.name,
        time.monotonic() - started_s,
        info.family,
        info.num_parameters / 1e6,
        info.dtype,
    )
    return LoadedModel(info, layout, runner, tokenizer)
