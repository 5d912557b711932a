from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.engine.distillation.target import Teacher
from tests.support.distillation import drawn_sequences, reference_hidden
from tests.support.tiny_models import write_tiny_family


@pytest.mark.parametrize("variant", ["llama", "gemma3", "qwen2"])
def test_states_are_those_of_the_reference_across_steps(tmp_path: Path, variant: str) -> None:
    folder = write_tiny_family(tmp_path, variant)
    # More than one step of 4096 tokens, the second one greater than the first, and no multiple of a block.
    sequences = drawn_sequences([5, 200, *[250] * 15, *[255] * 16, 1, 17])
    states = Teacher(folder, "float32").hidden(sequences)
    parts = torch.split(states, [len(sequence) for sequence in sequences])
    for place in (0, 1, 2, 16, 17, 18, 32, 33, 34):
        torch.testing.assert_close(
            parts[place], reference_hidden(folder, sequences[place]), rtol=1e-4, atol=1e-4
        )


def test_a_second_call_with_more_tokens_forgets_the_first(tmp_path: Path) -> None:
    teacher = Teacher(write_tiny_family(tmp_path, "llama"), "float32")
    few, many = drawn_sequences([40]), drawn_sequences([200, 200], seed=1)
    first = teacher.hidden(few)
    assert teacher.hidden(many).shape == (400, 64)
    torch.testing.assert_close(teacher.hidden(few), first)
