"""A decoder on its device: which attention backend, how much KV memory, which steps are captured."""

from __future__ import annotations

import logging

import torch

from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.attention.select import AttentionTask, choose_backend, compute_capability
from headrace.engine.config import CacheLayout, EngineConfig, SchedulerConfig
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import KVStorage, available_memory, block_size_for
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.spec import DecoderSpec
from headrace.engine.runner.cuda_graphs import CudaGraphMaker, DecodeGraphs, graph_reserve
from headrace.engine.runner.device import explained_out_of_memory
from headrace.engine.runner.gpu_memory import kv_budget, measure_gpu
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId

logger = logging.getLogger(__name__)

_PROFILED_SAMPLING = SamplingParams(temperature=1.0, top_p=0.95, min_p=0.01, seed=0)
"""What takes the most memory to draw with."""


class Placement:
    """What is decided once the weights are in place.

    Args:
        config: of the engine.
        decoder: on its device.
        max_model_len: longest sequence, tokens.

    Raises:
        ConfigError: no attention backend suits decoder, device and cache, or the configured one doesn't.
    """

    def __init__(self, config: EngineConfig, decoder: Decoder, max_model_len: int) -> None:
        spec = decoder.spec
        self._config, self._decoder, self._max_model_len = config, decoder, max_model_len
        self.shape = decoder.kv_shape
        task = attention_task(config, decoder.device, spec, decoder.dtype)
        self._choice = choose_backend(config.model.attention_backend, task)

    def memory_for_kv(self) -> int:
        """Bytes that the KV pool may take. On a GPU the largest steps are run once to see what they take.

        Raises:
            ConfigError: nothing is left.
        """
        device, config = self._decoder.device, self._config
        if device.type == "cpu":
            return available_memory(device)
        advice = "lower --max-num-batched-tokens or --max-num-seqs, or stop other processes on this GPU"
        with explained_out_of_memory("running the largest step once", advice):
            use = measure_gpu(device, self.run_largest_steps)
        reserve = graph_reserve(config.scheduler.max_num_seqs) if self._is_captured() else 0
        return kv_budget(use, config.cache.gpu_memory_utilization, reserve)

    def run_largest_steps(self) -> None:
        """Run what takes the most memory, over a pool of the null block and one more."""
        layout = CacheLayout(2, block_size_for(self._config.cache, self._decoder.device))
        runner = ModelRunner(self._decoder, self.build_attention(layout), layout)
        for plan in largest_steps(self._config.scheduler, self._max_model_len, layout.block_size):
            runner.execute(plan)

    def build_attention(self, layout: CacheLayout) -> AttentionBackend:
        """Allocate a pool and build the backend over it."""
        return self._choice.build(KVStorage(layout, self.shape, self._decoder.device))

    def capture_graphs(self, attention: AttentionBackend, layout: CacheLayout) -> DecodeGraphs | None:
        """Capture the decode steps, where they can be and are wanted; None elsewhere.

        Args:
            attention: over the pool of `layout`.

        Raises:
            ConfigError: capturing failed; it names the way around.
        """
        if not self._is_captured():
            return None
        max_num_seqs = self._config.scheduler.max_num_seqs
        graphs = DecodeGraphs(
            self._decoder,
            attention,
            layout,
            max_num_seqs=max_num_seqs,
            max_model_len=self._max_model_len,
            maker=CudaGraphMaker(self._decoder.device),
        )
        advice = "lower --gpu-memory-utilization or --max-num-seqs, or use --no-cuda-graphs"
        with explained_out_of_memory("capturing decode steps", advice):
            try:
                graphs.capture()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ConfigError(
                    f"decode steps can't be captured ({error}): use --no-cuda-graphs"
                ) from error
        if graphs.num_bytes > graph_reserve(max_num_seqs):
            logger.warning(
                "the graphs took %.0f MiB where %.0f were set aside: should memory run out, lower "
                "--gpu-memory-utilization",
                graphs.num_bytes / 2**20,
                graph_reserve(max_num_seqs) / 2**20,
            )
        return graphs

    def _is_captured(self) -> bool:
        capabilities = self._choice.capabilities
        if self._decoder.device.type == "cpu" or not self._config.model.cuda_graphs:
            return False
        if not capabilities.supports_graphs:
            logger.info("no graphs: attention backend %s can't be captured", capabilities.name)
            return False
        if any(layer.experts is not None for layer in self._decoder.spec.layers):
            logger.info("no graphs: how many tokens an expert gets is decided on the host")
            return False
        return True


def attention_task(
    config: EngineConfig,
    device: torch.device,
    spec: DecoderSpec | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionTask:
    """What an attention backend would have to do.

    Args:
        spec, dtype: of the decoder; None where they are not known yet.
    """
    return AttentionTask(
        device=device,
        compute_capability=compute_capability(device),
        dtype=dtype,
        block_size=block_size_for(config.cache, device),
        head_dim=None if spec is None else spec.head_dim,
        has_soft_cap=spec is not None and spec.attention_soft_cap is not None,
        may_split=config.model.kv_splits,
    )


def largest_steps(scheduler: SchedulerConfig, max_model_len: int, block_size: int) -> tuple[StepPlan, ...]:
    """A step that uses the whole token budget, and one in which every slot draws; over the null block."""

    def row(first_position: int, num_tokens: int) -> ScheduledSequence:
        return ScheduledSequence(
            sequence_id=SequenceId(-1),
            first_position=first_position,
            token_ids=(0,) * num_tokens,
            num_draft_tokens=0,
            block_ids=(0,) * -(-(first_position + num_tokens) // block_size),
            is_sampled=True,
            sampling=_PROFILED_SAMPLING,
        )

    left = scheduler.max_num_batched_tokens
    prompts: list[ScheduledSequence] = []
    while left and len(prompts) < scheduler.max_num_seqs:
        prompts.append(row(0, min(left, max_model_len)))
        left -= len(prompts[-1].token_ids)
    decodes = (row(max_model_len - 1, 1),) * scheduler.max_num_seqs
    return StepPlan(-1, tuple(prompts)), StepPlan(-1, decodes)
