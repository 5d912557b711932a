"""The whole engine over backends that take nothing a CUDA kernel would not take.

Scheduler, KV manager, runner and decoder as they are: chunked prompts, shared beginnings, preemption, several
sequences per prompt, drafts that are verified, captured decode steps. The kernels are the reference or
emulations of what runs on a GPU; every call goes through the checker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headrace.engine import AsyncEngine, FinishEvent, SamplingParams, Speculation
from headrace.engine.attention.backend import AttentionBackend
from headrace.engine.attention.flash import FlashBackend
from headrace.engine.attention.torch_varlen import TorchVarlenBackend
from headrace.engine.config import CacheLayout, ModelConfig
from headrace.engine.kv.storage import KVStorage
from headrace.engine.models.loader import LoadedDecoder, load_decoder
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.cuda_graphs import DecodeGraphs
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.runner.protocol import LoadedModel
from tests.support.contract_backend import ContractCheckingBackend
from tests.support.emulated_kernels import EmulatedKernels
from tests.support.engines import collect
from tests.support.greedy_margin import assert_greedy
from tests.support.paged_step import storage_for
from tests.support.requests import GREEDY, make_config, make_request, speculating
from tests.support.tiny_models import MAX_POSITIONS, tiny_llama, write_tiny_llama

NUM_NEW = 14
BEGINNING = tuple(range(60, 80))
PROMPTS = (
    (7, 8, 9),
    (*BEGINNING, 5),
    (*BEGINNING, 6, 7),
    tuple(range(100, 170)),
    (42, 43, 42, 43, 42, 43, 42),
    (300,),
)
HALF = frozenset({torch.float16, torch.bfloat16})
ANY = HALF | {torch.float32}


@dataclass(frozen=True)
class Setting:
    """What an engine runs over.

    Args:
        num_blocks: of the pool, so few that not all prompts find room at once.
        margin: by how much a token may be less likely than the likeliest; logits spread over several units.
    """

    kind: str
    block_size: int
    dtype: str
    num_blocks: int
    margin: float

    def backend(self, storage: KVStorage) -> AttentionBackend:
        kernels = EmulatedKernels(tuple(ANY if self.dtype == "float32" else HALF))
        inner: dict[str, Callable[[], AttentionBackend | None]] = {
            "reference": lambda: None,
            "flash": lambda: FlashBackend(storage, kernels.flash),
            "torch_varlen": lambda: TorchVarlenBackend(storage, kernels.varlen_attn),
        }
        return ContractCheckingBackend(
            storage,
            inner[self.kind](),
            block_size_multiple=1 if self.kind == "reference" else 256,
            dtypes=ANY,
        )

    def __str__(self) -> str:
        return f"{self.kind}, {self.dtype}, blocks of {self.block_size}"


SETTINGS = [
    Setting("reference", 4, "float32", 30, 1e-3),
    Setting("reference", 16, "float32", 9, 1e-3),
    Setting("reference", 16, "bfloat16", 9, 0.3),
    Setting("reference", 256, "float32", 3, 1e-3),
    Setting("flash", 256, "float32", 3, 1e-3),
    Setting("flash", 256, "bfloat16", 3, 0.3),
    Setting("torch_varlen", 256, "float32", 3, 1e-3),
    Setting("torch_varlen", 256, "bfloat16", 3, 0.3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


class Repeating:
    """In place of graphs: runs the launch again."""

    num_replays = 0

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()

        def replay() -> None:
            self.num_replays += 1
            launch()

        return replay

    def num_bytes(self) -> int:
        return 0


def loaded_model(folder: Path, setting: Setting, maker: Repeating | None) -> LoadedModel:
    loaded: LoadedDecoder = load_decoder(ModelConfig(folder, dtype=setting.dtype), torch.device("cpu"))
    decoder, layout = loaded.decoder, CacheLayout(setting.num_blocks + 1, setting.block_size)
    storage = storage_for(decoder.spec, layout.num_blocks, layout.block_size, decoder.dtype)
    attention = setting.backend(storage)
    graphs = None
    if maker is not None:
        graphs = DecodeGraphs(
            decoder, attention, layout, max_num_seqs=4, max_model_len=MAX_POSITIONS, maker=maker
        )
        graphs.capture()
    runner = ModelRunner(decoder, attention, layout, graphs=graphs)
    return LoadedModel(loaded.info, layout, runner, load_tokenizer(folder))


@pytest.mark.parametrize("with_graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
async def test_the_engine_keeps_the_contract_and_says_what_transformers_says(
    folder: Path, setting: Setting, *, with_graphs: bool
) -> None:
    maker = Repeating() if with_graphs else None
    async with AsyncEngine(loaded_model(folder, setting, maker), make_config()) as engine:
        streams = [
            engine.submit(make_request(prompt=prompt, max_tokens=NUM_NEW, ignore_eos=True))
            for prompt in PROMPTS
        ]
        drawn = engine.submit(
            make_request(
                prompt=(11, 12, 13), max_tokens=5, n=2, sampling=SamplingParams(temperature=0.9, seed=5)
            )
        )
        answers = [await collect(stream) for stream in streams]
        assert sum([isinstance(event, FinishEvent) async for event in drawn]) == 2
        await engine.wait_idle()
        load = engine.load()

    assert all(isinstance(last, FinishEvent) for _, _, last in answers), answers
    for prompt, (token_ids, _, _) in zip(PROMPTS, answers, strict=True):
        assert len(token_ids) == NUM_NEW
        assert_greedy(tiny_llama(), prompt, token_ids, setting.margin)
    assert load.blocks.live == 0
    assert maker is None or maker.num_replays > 0


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[4], SETTINGS[7]], ids=str)
async def test_drafts_are_verified_within_the_contract(folder: Path, setting: Setting) -> None:
    """Rows of one token and its drafts: several query tokens that end at the bottom right."""
    config = make_config(speculation=speculating(Speculation.PROMPT_LOOKUP, 3))
    async with AsyncEngine(loaded_model(folder, setting, None), config) as engine:
        streams = [
            engine.submit(make_request(prompt=p, max_tokens=40, sampling=GREEDY, ignore_eos=True))
            for p in PROMPTS
        ]
        answers = [await collect(stream) for stream in streams]

    for prompt, (token_ids, _, last) in zip(PROMPTS, answers, strict=True):
        assert isinstance(last, FinishEvent)
        assert len(token_ids) == 40
        assert_greedy(tiny_llama(), prompt, token_ids, setting.margin)
    # Without drafts there would be nothing to verify.
    assert sum(last.usage.num_draft_tokens for _, _, last in answers if isinstance(last, FinishEvent)) > 0
