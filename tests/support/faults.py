"""The fault switch: what may break in a served model. It lies among the tests, so no wheel has it.

A fault is written ``KIND``, ``KIND@STEP`` or ``KIND@STEP+``: it strikes whatever computes, spells or encodes
`POISON`, or one step, or every step from one on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from headrace.engine import CacheConfig, EngineConfig, LoadedModel, ModelConfig, SchedulerConfig
from headrace.engine.attention.cpu import CpuBackend
from headrace.engine.config import CacheLayout
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.loader import load_decoder
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.runner.protocol import LaunchedStep, Runner
from headrace.engine.scheduling.plan import StepPlan, StepResult
from headrace.engine.tokenizer import Tokenizer
from tests.support.poisoned_decoder import PoisonedDecoder

POISON = 66
"""The token id that faults look for."""
POISON_TEXT = "<poison>"
SECRET = "tell-nobody"
"""Stands in every exception that a fault raises: no client, no log may show it."""

LAYOUT = CacheLayout(257, 4)
_RELEASED_WITHIN_S = 120.0
_SLOW_S = 0.2


class Panic(BaseException):
    """What Rust's panics are to Python: no `Exception`. Libraries with a core in Rust raise it."""

    __module__ = "pyo3_runtime"


Panic.__name__ = "PanicException"


class FaultKind(StrEnum):
    """What breaks."""

    NONE = "none"
    SLOW_LOADER = "slow-loader"
    SLOW_STEP = "slow-step"
    RAISE = "raise"
    PANIC = "panic"
    DEATH = "death"
    HANG = "hang"
    OUT_OF_MEMORY = "out-of-memory"
    NAN_ROW = "nan-row"
    WRONG_LENGTH = "wrong-length"
    TOKENIZER = "tokenizer"
    TOKENIZER_PANIC = "tokenizer-panic"
    DETOKENIZER = "detokenizer"
    DETOKENIZER_PANIC = "detokenizer-panic"


@dataclass
class Fault:
    """A fault, and when it strikes.

    Args:
        step: number of the step that it strikes once; None for whatever has to do with `POISON`.
        lasts: whether it strikes all steps from that one on.
        released: ends what is slow or hangs.
        num_struck: how often it has struck.
    """

    kind: FaultKind = FaultKind.NONE
    step: int | None = None
    lasts: bool = False
    released: threading.Event = field(default_factory=threading.Event)
    num_struck: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """A fault as it is written."""
        kind, _, when = text.partition("@")
        step = int(when.removesuffix("+")) if when else None
        return cls(FaultKind(kind), step, lasts=when.endswith("+"))

    def strikes(self, plan: StepPlan) -> bool:
        """Whether a step is to go wrong; counts it."""
        if self.step is None:
            is_struck = any(POISON in row.token_ids for row in plan.rows)
        elif self.lasts:
            # The step that nobody asked for goes wrong, too.
            is_struck = plan.step >= self.step or plan.step < 0 < self.num_struck
        else:
            is_struck = plan.step >= self.step and not self.num_struck
        self.num_struck += is_struck
        return is_struck

    def wait(self) -> None:
        """Hold whoever comes by until the fault is released."""
        if not self.released.wait(_RELEASED_WITHIN_S):
            raise TimeoutError("the test never released its fault")


class FaultyRunner:
    """A runner that does its work but for the steps that are struck."""

    def __init__(self, runner: Runner, fault: Fault) -> None:
        self._runner = runner
        self._fault = fault

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return _FaultyStep(self._runner.launch(plan), self._fault, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).fetch()

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True)
class _FaultyStep:
    """A step whose fault shows when it is fetched, as a GPU's do."""

    _launched: LaunchedStep
    _fault: Fault
    _plan: StepPlan

    def fetch(self) -> StepResult:
        if not self._fault.strikes(self._plan):
            return self._launched.fetch()
        match self._fault.kind:
            case FaultKind.SLOW_STEP:
                self._fault.released.wait(_SLOW_S)
            case FaultKind.HANG:
                self._fault.wait()
            case FaultKind.RAISE:
                raise RuntimeError(SECRET)
            case FaultKind.PANIC:
                raise Panic(SECRET)
            case FaultKind.DEATH:
                raise SystemExit(SECRET)
            case FaultKind.OUT_OF_MEMORY if len(self._plan.rows) > 1:
                raise torch.OutOfMemoryError(SECRET)
            case FaultKind.WRONG_LENGTH:
                result = self._launched.fetch()
                return replace(result, rows=result.rows[:-1])
        return self._launched.fetch()


class FaultyTokenizer:
    """A tokenizer that is itself but for the poisoned text and token."""

    def __init__(self, tokenizer: Tokenizer, fault: Fault) -> None:
        self._tokenizer = tokenizer
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._break(POISON_TEXT in text, FaultKind.TOKENIZER, FaultKind.TOKENIZER_PANIC)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, rendered: str) -> list[int]:
        self._break(POISON_TEXT in rendered, FaultKind.TOKENIZER, FaultKind.TOKENIZER_PANIC)
        return self._tokenizer.encode_chat(rendered)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self._break(POISON in token_ids, FaultKind.DETOKENIZER, FaultKind.DETOKENIZER_PANIC)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes | None:
        self._break(token_id == POISON, FaultKind.DETOKENIZER, FaultKind.DETOKENIZER_PANIC)
        return self._tokenizer.token_bytes(token_id, skip_special_tokens=skip_special_tokens)

    def _break(self, is_poisoned: bool, raises: FaultKind, panics: FaultKind) -> None:
        if is_poisoned and self._fault.kind in (raises, panics):
            self._fault.num_struck += 1
            raise RuntimeError(SECRET) if self._fault.kind is raises else Panic(SECRET)


def faulty_config(folder: Path) -> EngineConfig:
    """What an engine over `faulty_model` is told."""
    return EngineConfig(
        model=ModelConfig(folder, dtype="float32"),
        cache=CacheConfig(LAYOUT.block_size, LAYOUT.num_usable_blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        check_integrity=True,
    )


def faulty_model(folder: Path, fault: Fault) -> LoadedModel:
    """The tiny model of a folder, served by the real runner, with a fault built in."""
    if fault.kind is FaultKind.SLOW_LOADER:
        fault.wait()
    loaded = load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu"))
    decoder = loaded.decoder
    storage = KVStorage(
        LAYOUT,
        decoder.kv_shape,
        torch.device("cpu"),
    )
    model = PoisonedDecoder(decoder, POISON) if fault.kind is FaultKind.NAN_ROW else decoder
    runner = ModelRunner(model, CpuBackend(storage), LAYOUT)
    tokenizer: Any = FaultyTokenizer(load_tokenizer(folder), fault)
    return LoadedModel(loaded.info, LAYOUT, FaultyRunner(runner, fault), tokenizer)
