"""Tensors that travel together arrive as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.engine.transfer import download, on_device, upload


def test_types_shapes_and_contents_stay() -> None:
    tensors = [
        torch.arange(5),
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([1.5, -2.0], dtype=torch.float64),
        torch.tensor([True]),
    ]

    there = upload(tensors, torch.device("cpu"))

    assert [t.dtype for t in there] == [t.dtype for t in tensors]
    assert all(torch.equal(a, b) for a, b in zip(there, tensors, strict=True))


def test_each_begins_where_kernels_can_load_it_in_one_go() -> None:
    there = upload([torch.arange(n, dtype=torch.int32) for n in (1, 3, 5)], torch.device("cpu"))

    assert [t.storage_offset() * t.element_size() % 16 for t in there] == [0, 0, 0]


def test_what_arrived_does_not_change_with_what_was_sent() -> None:
    sent = torch.arange(3)
    (there,) = upload([sent], torch.device("cpu"))

    sent.zero_()

    assert there.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([3, 2**40], None, torch.tensor([3, 2**40])),
        ([0.5, 2.0], torch.float64, torch.tensor([0.5, 2.0], dtype=torch.float64)),
        (np.frombuffer(b"\x00\xff", np.uint8), None, torch.tensor([0, 255], dtype=torch.uint8)),
    ],
    ids=["ids", "floats", "read-only bytes"],
)
def test_numbers_of_the_host_keep_their_type(
    values: Any, dtype: torch.dtype | None, expected: Tensor
) -> None:
    made = on_device(values, torch.device("cpu"), dtype)
    assert made.dtype is expected.dtype
    assert torch.equal(made, expected)


def test_what_comes_back_is_flat_and_row_by_row() -> None:
    assert download(torch.arange(6).view(2, 3).t()) == [0, 3, 1, 4, 2, 5]
