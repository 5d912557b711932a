"""A model without floats: the next token is a pure function of all token ids of the sequence.

Whatever the batch, the chunking, the preemptions: a request's output must equal its output alone. The
runner reads the ids back from its own KV pool through the block table it is given, and each slot knows behind
which tokens it was written, so a wrong table, a block freed too early or shared wrongly, or a skipped token
shows as an error, not as noise.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.engine.config import CacheLayout, ModelInfo
from headrace.engine.errors import InvalidRequest, NoChatTemplate
from headrace.engine.runner.protocol import LoadedModel
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult, as_known
from headrace.engine.tokenizer import Chat

NUM_BYTES = 256
BOS, EOS = 256, 257
VOCAB_SIZE = 258


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """The token that follows `token_ids`: a printable ASCII byte, never an end id."""
    key = b",".join(b"%d" % token_id for token_id in token_ids)
    digest = hashlib.blake2b(key, digest_size=8, key=b"%d" % seed).digest()
    return 97 + int.from_bytes(digest, "little") % 26


def repetitive_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """Another choice of token: it looks at the last two alone, so the text soon repeats itself, mostly."""
    return next_token(token_ids[-2:], seed) if len(token_ids) % 11 else next_token(token_ids, seed)


def expected_output(
    prompt: Sequence[int],
    num_tokens: int,
    seed: int = 0,
    choose: Callable[[Sequence[int], int], int] = next_token,
) -> list[int]:
    """What a request makes alone."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(choose(token_ids, seed))
    return token_ids[len(prompt) :]


def useless_draft(token_ids: Sequence[int], seed: int) -> int:
    """A draft that is never right."""
    return next_token(token_ids, seed) + 1 if next_token(token_ids, seed) < 122 else 97


def half_right_draft(token_ids: Sequence[int], seed: int) -> int:
    """A draft that is right about every other time, so that every number of kept drafts occurs."""
    is_right = _fingerprint(token_ids)[0] % 2
    return next_token(token_ids, seed) if is_right else useless_draft(token_ids, seed)


def _fingerprint(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()


class KvViolationError(AssertionError):
    """The engine's block tables or positions are wrong."""


@dataclass
class FakeRunner:
    """Obeys `headrace.engine.runner.protocol.Runner`.

    Args:
        layout: the pool it keeps.
        before_step: called with each plan before it is run; may raise or block.
        choose: replaces `next_token`.
        draft: what the draft model chooses; it has KV of its own behind the same blocks. None: there is none.
    """

    layout: CacheLayout
    before_step: Callable[[StepPlan], None] = lambda plan: None
    choose: Callable[[Sequence[int], int], int] = next_token
    draft: Callable[[Sequence[int], int], int] | None = None
    plans: list[StepPlan] = field(default_factory=list)
    is_closed: bool = False
    _last: tuple[int | None, list[int]] = (None, [])
    _slots: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    _draft_slots: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> FakeStep:
        """The step is computed when it is fetched, as by a device that is behind with its work."""
        return FakeStep(self, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).fetch()

    def compute(self, plan: StepPlan) -> StepResult:
        """What happens on the device."""
        last, self._last = self._last, (None, [])
        self.before_step(plan)
        self.plans.append(plan)
        if plan.follows is not None:
            assert plan.follows == last[0], f"step {plan.step} follows {plan.follows}, and {last[0]} was last"
            plan = as_known(plan, last[1])
        rows = [self._with_drafts(row) for row in plan.rows]
        for row in rows:
            self._write(row, self._slots)
        result = StepResult(tuple(self._draw(row) for row in rows))
        self._last = (plan.step, [row.token_ids[-1] for row in result.rows if row.token_ids])
        return result

    def close(self) -> None:
        self.is_closed = True

    def _slot(self, row: ScheduledSequence, position: int) -> int:
        block_id = row.block_ids[position // self.layout.block_size]
        is_test = row.sequence_id == -1  # nobody's, over the null block
        if not is_test and not 0 < block_id < self.layout.num_blocks:
            raise KvViolationError(f"block {block_id} is not one that a sequence may hold")
        return block_id * self.layout.block_size + position % self.layout.block_size

    def _with_drafts(self, row: ScheduledSequence) -> ScheduledSequence:
        """Let the draft model catch up and propose."""
        work = row.draft
        if work is None:
            return row
        assert self.draft is not None, "a plan wants drafts of a draft model that is not there"
        text = self._read(row, work.first_position, self._draft_slots)
        known = row._replace(first_position=work.first_position, token_ids=work.token_ids, num_draft_tokens=0)
        self._write(known, self._draft_slots)
        text += work.token_ids
        drafts: list[int] = []
        for _ in range(work.num_drafts):
            drafts.append(self.draft(text + drafts, _seed_of(row)))
        # The last draft is proposed and not computed.
        computed = known._replace(first_position=len(text), token_ids=tuple(drafts[:-1]))
        self._write(computed, self._draft_slots)
        return row._replace(token_ids=row.token_ids + tuple(drafts), num_draft_tokens=len(drafts), draft=None)

    def _write(self, row: ScheduledSequence, slots: dict[int, tuple[bytes, int]]) -> None:
        beginning = self._read(row, row.first_position, slots)
        for position, token_id in enumerate(row.token_ids, start=row.first_position):
            beginning.append(token_id)
            slots[self._slot(row, position)] = (_fingerprint(beginning), token_id)

    def _read(
        self, row: ScheduledSequence, num_tokens: int, slots: dict[int, tuple[bytes, int]]
    ) -> list[int]:
        """The row's first tokens, from the slots; each slot must have been written behind the same tokens."""
        token_ids: list[int] = []
        for position in range(num_tokens):
            fingerprint, token_id = slots.get(self._slot(row, position), (b"", -1))
            token_ids.append(token_id)
            if fingerprint != _fingerprint(token_ids):
                raise KvViolationError(
                    f"sequence {row.sequence_id}: position {position} holds another text's KV"
                )
        return token_ids

    def _draw(self, row: ScheduledSequence) -> RowResult:
        token_ids = self._read(row, row.end_position, self._slots)
        if not row.is_sampled:
            return RowResult()
        run: list[int] = []
        for i in range(row.num_draft_tokens + 1):
            run.append(self.choose(token_ids[: row.known_end + i], _seed_of(row)))
            if i == row.num_draft_tokens or run[-1] != row.draft_token_ids[i]:
                break
        return RowResult(tuple(run), num_draft_tokens=row.num_draft_tokens)


@dataclass(frozen=True)
class FakeStep:
    """A step of a `FakeRunner` that has not been computed yet."""

    runner: FakeRunner
    plan: StepPlan

    def fetch(self) -> StepResult:
        return self.runner.compute(self.plan)


def _seed_of(row: ScheduledSequence) -> int:
    return 0 if row.sampling.is_greedy else row.sampling.seed


class FakeTokenizer:
    """Bytes are ids; 256 begins and 257 ends a sequence. Its chat template writes ``role: content`` lines."""

    def __init__(self, *, has_chat_template: bool = True, is_byte_level: bool = True) -> None:
        self._has_chat_template = has_chat_template
        self._is_byte_level = is_byte_level

    @property
    def has_chat_template(self) -> bool:
        return self._has_chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens * bool(text) + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        pieces = (_spell(i, skip_special_tokens=skip_special_tokens) for i in token_ids)
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes | None:
        return _spell(token_id, skip_special_tokens=skip_special_tokens) if self._is_byte_level else None

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        byte = "<0x{:02X}>" if self._is_byte_level else "piece {}"
        return [{BOS: "<s>", EOS: "</s>"}.get(i) or byte.format(i) for i in token_ids]

    def special_token_id(self, text: str) -> int | None:
        return {"<s>": BOS, "</s>": EOS}.get(text)

    def render_chat(self, chat: Chat) -> str:
        if not self._has_chat_template:
            raise NoChatTemplate("the model has no chat template")
        if not chat.messages:
            raise InvalidRequest.of("chat.messages", "must hold at least one message")
        text = "".join(f"{message.role}: {message.content}\n" for message in chat.messages)
        return text + "assistant: " * chat.add_generation_prompt

    def encode_chat(self, rendered: str) -> list[int]:
        return list(rendered.encode())


def _spell(token_id: int, *, skip_special_tokens: bool) -> bytes:
    if token_id < NUM_BYTES:
        return bytes([token_id])
    return b"" if skip_special_tokens else {BOS: b"<s>", EOS: b"</s>"}[token_id]


def make_fake_model(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    before_step: Callable[[StepPlan], None] = lambda plan: None,
    choose: Callable[[Sequence[int], int], int] = next_token,
    tokenizer: FakeTokenizer | None = None,
    draft: Callable[[Sequence[int], int], int] | None = None,
    draft_max_len: int | None = None,
) -> LoadedModel:
    """A served model over a `FakeRunner`.

    Args:
        num_blocks: blocks that sequences can hold (the null block comes on top).
        draft: see `FakeRunner`.
        draft_max_len: longest sequence of the draft model; None takes the model's own.
    """
    layout = CacheLayout(num_blocks + 1, block_size)
    info = ModelInfo(
        name="fake",
        family="fake",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        bos_token_id=BOS,
        dtype="none",
        num_parameters=0,
    )
    if draft is not None and draft_max_len is None:
        draft_max_len = max_model_len
    runner = FakeRunner(layout, before_step, choose, draft)
    return LoadedModel(info, layout, runner, tokenizer or FakeTokenizer(), draft_max_len)
