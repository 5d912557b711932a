"""From a configuration to a model that is ready to run: weights, KV pool, attention, tokenizer, warm-up."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.heap import give_back_memory
from headrace.engine.kv.storage import available_memory, resolve_layout
from headrace.engine.models.loader import DTYPES, check_dtype, choose_dtype, load_decoder, read_spec
from headrace.engine.models.tokenizer import HFTokenizer, load_tokenizer
from headrace.engine.runner.device import choose_device, explained_out_of_memory
from headrace.engine.runner.draft_loading import load_draft
from headrace.engine.runner.foresight import check_room
from headrace.engine.runner.host import prepare_host
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.runner.placement import Placement
from headrace.engine.runner.protocol import LoadedModel, LoadProgress

logger = logging.getLogger(__name__)

_WARMING_UP = "warming up"
_CPU_WARM_UP_TOKENS = 64
_BESIDE_BYTES = 96 * 2**20
"""What a tokenizer and its library take, and the first step, before any of it is there: as SmolLM2 (49,152
tokens) needs it in containers of 2 to 3 times its weights, `tests/containers/run.sh`."""
_LESS_MEMORY = "take a smaller model or type (--dtype bfloat16), or stop other processes on this GPU"


def load(config: EngineConfig, progress: LoadProgress | None = None) -> LoadedModel:
    """See `headrace.engine.loading.load_model`."""
    started_s = time.monotonic()
    prepare_host(config.num_threads)
    device = choose_device(config.model.device)
    # First, so that no fault of the folder or its config.json is blamed on the tokenizer.
    read_spec(config.model.path)
    config = _with_dtype(config, device)
    beside = _BESIDE_BYTES if device.type == "cpu" else 0
    check_room(config, device, DTYPES[config.model.dtype], max(0, available_memory(device) - beside))
    # Half of it is the library's import: the weights are read meanwhile.
    with ThreadPoolExecutor(1, thread_name_prefix="headrace-tokenizer") as pool:
        reading = pool.submit(load_tokenizer, config.model.path)
        with explained_out_of_memory("reading the weights", _LESS_MEMORY):
            loaded = load_decoder(
                config.model,
                device,
                partial(_tell, reading, progress),
                tokenizer_eos_token_ids=lambda: reading.result().eos_token_ids,
            )
        tokenizer = reading.result()
    decoder, info = loaded.decoder, loaded.info
    draft = load_draft(config, device, info, tokenizer, progress)
    placement = Placement(config, decoder, info.max_model_len)
    layout = resolve_layout(
        config.cache,
        placement.shape,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=info.max_model_len,
        available_bytes=placement.memory_for_kv(),
        device=device,
        draft_shape=None if draft is None else draft.kv_shape,
    )
    attention = placement.build_attention(layout)
    graphs = placement.capture_graphs(attention, layout)
    runner = ModelRunner(
        decoder, attention, layout, None if draft is None else draft.build(layout), graphs=graphs
    )
    longest = min(config.scheduler.max_num_batched_tokens, info.max_model_len)
    if device.type == "cpu":
        # What a first call costs beyond its computing is the same for a short step.
        longest = min(longest, _CPU_WARM_UP_TOKENS)
    if progress is not None:
        progress(_WARMING_UP, 0, 1)
    give_back_memory()
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
    draft_max_len = None if draft is None else draft.info.max_model_len
    return LoadedModel(info, layout, runner, tokenizer, draft_max_len, computes_apart=device.type != "cpu")


def _tell(
    tokenizer: Future[HFTokenizer], progress: LoadProgress | None, stage: str, done: int, total: int
) -> None:
    """Tell how far the weights are. A tokenizer that can't be read ends it: nobody waits for the others."""
    if tokenizer.done():
        tokenizer.result()
    if progress is not None:
        progress(stage, done, total)


def _with_dtype(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Say which type "auto" is; the others are chosen, and doubted, where the weights are read."""
    check_dtype(config.model.dtype, device)
    if config.model.dtype != "auto":
        return config
    chosen = str(choose_dtype("auto", device)).removeprefix("torch.")
    return replace(config, model=replace(config.model, dtype=chosen))
