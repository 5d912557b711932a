"""A device far from the host, where there is none: what runs there, and that nobody waits for it on the way.

Torch's "meta" device has shapes and no numbers: whatever hangs on a number raises. `as_if_far` has the code
that is meant for such devices run on a CPU, where its numbers can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.engine.runner import results
from headrace.engine.sampling import logprobs, rejection, truncation
from headrace.engine.speculative import draft_model
from headrace.engine.transfer import Download

FAR = torch.device("meta")
LOOKS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "nonzero_static",
    "equal",
    "is_nonzero",
    "masked_select",
    "bincount",
    "unique",
    "_unique2",
    "histc",
)
"""Operations whose result, or its shape, the host needs: on a GPU each waits for all that was launched."""


@contextmanager
def as_if_far() -> Iterator[None]:
    """Sample on this CPU as on a device whose numbers take waiting to look at."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (logprobs, rejection, truncation):
            patch.setattr(module, "is_at_hand", lambda _: False)
        yield


@dataclass
class Watch(TorchDispatchMode):
    """While it is on: what makes the host wait for the far device, and how often results are fetched.

    Args:
        waits: what was done, in words.
        num_downloads: how often results were fetched.
    """

    waits: list[str] = field(default_factory=list)
    num_downloads: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        parameters = [parameter.name for parameter in func._schema.arguments]  # noqa: SLF001
        given = dict(zip(parameters, args, strict=False)) | dict(kwargs or {})
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        indices = [i for value in given.values() if isinstance(value, list) for i in value]
        indices = [i for i in indices if isinstance(i, Tensor)]
        if any(tensor.device == FAR for tensor in (*tensors, *indices)):
            if name in LOOKS:
                self.waits.append(name)
            if name == "repeat_interleave" and given.get("output_size") is None:
                self.waits.append("repeat_interleave without its size")
            if "index" in name and any(i.dtype is torch.bool for i in indices):
                self.waits.append(f"{name} by a mask")
        self._note_copy(name, tensors, given)
        return func(*args, **dict(kwargs or {}))

    def _note_copy(self, name: str, tensors: Sequence[Tensor], given: Mapping[str, Any]) -> None:
        # In inference mode torch shows `to` itself, elsewhere what it is made of.
        if name not in {"to", "_to_copy", "copy_"}:
            return
        source, target = tensors[-1].device, tensors[0].device if name == "copy_" else given.get("device")
        if target is not None and source != target and not given.get("non_blocking", False):
            self.waits.append(f"a copy from {source} to {target}")


@dataclass
class _Makings(TorchFunctionMode):
    """What is made of the host's numbers on the far device, which no operation shows: it waits on a GPU."""

    waits: list[str]

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in {torch.tensor, torch.as_tensor, torch.asarray} and given.get("device") == FAR:
            self.waits.append("a tensor made of the host's numbers")
        return func(*args, **given)


@contextmanager
def watching() -> Iterator[Watch]:
    """Watch what is done meanwhile. What is fetched is a one for each number: token 1, of a healthy row that
    has a choice."""
    watch = Watch()

    class Ones(Download):
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def numbers(self) -> list[float]:
            watch.num_downloads += 1
            return [1.0] * self.tensor.numel()

    with pytest.MonkeyPatch.context() as patch, _Makings(watch.waits), watch:
        patch.setattr(results, "Download", Ones)
        patch.setattr(draft_model, "download", lambda tensor: Ones(tensor).numbers())
        yield watch
