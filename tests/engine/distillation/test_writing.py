from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.engine import CacheConfig, ConfigError, EngineConfig, ModelConfig, SchedulerConfig
from headrace.engine.distillation.writing import Writer, conversation_of
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.loading import load
from headrace.engine.scheduling.plan import StepPlan, StepResult
from tests.support.blocking import Blocking
from tests.support.tiny_models import CHAT_TEMPLATE, IM_END_ID, IM_START_ID, tiny_tokenizer, write_tiny_llama


def target_of(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, **overrides: Any) -> Path:
    write_tiny_llama(folder, num_hidden_layers=1, **overrides)
    tiny_tokenizer(chat_template=chat_template).save_pretrained(folder)
    if chat_template is None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@contextmanager
def writer_of(folder: Path, seed: int = 0) -> Iterator[Writer]:
    config = EngineConfig(
        model=ModelConfig(folder, dtype="float32"),
        cache=CacheConfig(block_size=16, memory_bytes=2**24),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_waiting=4096),
    )
    model = load(config)
    try:
        yield Writer(model, config, seed)
    finally:
        model.runner.close()


def some_texts(folder: Path, count: int, max_len: int, seed: int = 0) -> list[tuple[int, ...]]:
    with writer_of(folder, seed) as writer:
        return list(islice(writer.texts(max_len), count))


def test_a_conversation_begins_as_the_template_writes_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(target_of(tmp_path))
    conversation = conversation_of(tokenizer)
    assert conversation is not None
    assert tokenizer.decode(conversation.before, skip_special_tokens=False) == "<|im_start|>user\n"
    assert tokenizer.decode(conversation.after, skip_special_tokens=False) == (
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] | upper }}"])
def test_without_a_template_that_keeps_messages_there_is_no_conversation(
    tmp_path: Path, template: str | None
) -> None:
    assert conversation_of(load_tokenizer(target_of(tmp_path, chat_template=template))) is None


def test_a_chat_model_makes_up_both_sides(tmp_path: Path) -> None:
    target = target_of(tmp_path)
    conversation = conversation_of(load_tokenizer(target))
    assert conversation is not None
    texts = some_texts(target, 100, 48)
    messages = set()
    for text in texts:
        assert len(text) <= 48
        assert text[: len(conversation.before)] == conversation.before
        ends = range(len(conversation.before) + 1, len(text))
        # A message of its own, then what the template puts behind it, then an answer of a token or more.
        (*_, end) = (i for i in ends if text[i : i + len(conversation.after)] == conversation.after)
        assert end + len(conversation.after) < len(text)
        messages.add(text[len(conversation.before) : end])
        assert IM_END_ID not in text[len(conversation.before) : end]
    assert len(messages) > 90


def test_an_answer_keeps_the_end_that_the_model_gave_it(tmp_path: Path) -> None:
    texts = some_texts(target_of(tmp_path, chat_template=None), 128, 100)
    ended = [text for text in texts if len(text) < 100]
    assert len(ended) > 10
    assert {text[-1] for text in ended} <= {0, IM_END_ID}


def test_a_model_without_template_starts_from_nothing(tmp_path: Path) -> None:
    texts = some_texts(target_of(tmp_path, chat_template=None), 40, 12)
    assert all(text[0] == 0 and 2 <= len(text) <= 12 for text in texts)
    assert len(set(texts)) > 35


def test_a_seed_gives_the_same_texts_again_and_another_one_others(tmp_path: Path) -> None:
    target = target_of(tmp_path)
    first, again, other = (some_texts(target, 30, 40, seed) for seed in (0, 0, 1000))
    assert first == again
    assert not set(first) & set(other)


def test_texts_go_on_without_repeating_themselves(tmp_path: Path) -> None:
    texts = some_texts(target_of(tmp_path, chat_template=None), 600, 16)
    long = [text for text in texts if len(text) == 16]
    assert len(long) > 300
    assert len(set(long)) == len(long)


def test_texts_end_where_the_model_ends(tmp_path: Path) -> None:
    target = target_of(tmp_path, max_position_embeddings=40)
    assert max(map(len, some_texts(target, 60, 4096))) == 40


def test_a_template_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    wordy = "{{ 'The miller said, and said again, and said it once more: ' * 9 + messages[0]['content'] }}"
    with pytest.raises(ConfigError, match="no room for a message in 32 tokens"):
        some_texts(target_of(tmp_path, chat_template=wordy), 1, 32)


def test_greedy_answers_go_on_past_the_end_up_to_the_context(tmp_path: Path) -> None:
    with writer_of(target_of(tmp_path, max_position_embeddings=40)) as writer:
        prompts = [(IM_START_ID, 50), tuple(range(100, 130))]
        answers = writer.greedy_answers(prompts, 20)
        assert [len(answer) for answer in answers] == [22, 40]
        assert [answer[: len(prompt)] for answer, prompt in zip(answers, prompts, strict=True)] == prompts
        assert writer.greedy_answers(prompts, 20) == answers


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
def test_who_has_finished_makes_room_for_the_next_text_at_once(tmp_path: Path, template: str | None) -> None:
    config = EngineConfig(
        model=ModelConfig(
            target_of(tmp_path, chat_template=template, eos_token_id=list(range(0, 512, 16))), dtype="float32"
        ),
        cache=CacheConfig(block_size=16, memory_bytes=2**24),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    model = load(config)
    num_rows: list[int] = []

    class Counting(Blocking):
        def execute(self, plan: StepPlan) -> StepResult:
            num_rows.append(len(plan.rows))
            return model.runner.execute(plan)

    try:
        writer = Writer(replace(model, runner=cast("Any", Counting())), config, seed=0)
        texts = list(islice(writer.texts(40), 40))
    finally:
        model.runner.close()
    assert len({len(text) for text in texts}) > 3
    assert set(num_rows) == {8}


def test_a_model_that_says_nothing_to_its_template_is_refused(tmp_path: Path) -> None:
    silent = target_of(tmp_path, eos_token_id=list(range(512)))
    with pytest.raises(ConfigError, match="makes up no messages"):
        some_texts(silent, 1, 32)
