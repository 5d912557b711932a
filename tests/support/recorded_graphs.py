"""What a CUDA graph keeps, kept on a CPU: operations, the tensors they read and write, numbers of the host.

A replay runs the same operations on the same tensors. What a captured step has made of a number of the host,
or where it has found a tensor, is what it goes on with, whatever the Python around it would do by now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.support.far_device import LOOKS


class Recording(TorchDispatchMode):
    """While it is on, operations are done and noted; `replay` does them again."""

    def __init__(self) -> None:
        super().__init__()
        self.is_within_kernel = False
        self._calls: list[tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if self.is_within_kernel:
            return func(*args, **given)
        name = func.overloadpacket.__name__
        if name in LOOKS:
            raise RuntimeError(f"{name} while a graph is captured: the host would have to wait for a number")
        out = func(*args, **given)
        # A view is where it was, and what writes in place says itself what it has written.
        schema = func._schema  # noqa: SLF001
        if not any(result.alias_info for result in schema.returns):
            self.note(func, args, given, out)
        elif schema.is_mutable:
            self.note(func, args, given, None)
        return out

    def note(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Remember a call. What `out` holds is written anew at each replay."""
        self._calls.append((func, args, kwargs, out))

    def replay(self) -> None:
        """Do it all again."""
        for func, args, kwargs, out in self._calls:
            new = func(*args, **kwargs)
            if out is not None:
                for place, result in zip(tree_flatten(out)[0], tree_flatten(new)[0], strict=True):
                    if isinstance(place, Tensor):
                        place.copy_(result)


class RecordingMaker:
    """See `headrace.engine.runner.cuda_graphs.GraphMaker`."""

    def __init__(self) -> None:
        self.num_replays = 0
        self._recording: Recording | None = None

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        # As on a GPU: once to warm up, once to capture.
        launch()
        recording = self._recording = Recording()
        with recording:
            launch()
        self._recording = None

        def replay() -> None:
            self.num_replays += 1
            recording.replay()

        return replay

    def num_bytes(self) -> int:
        return 0

    def kernel(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """One kernel: it is captured as one call, and may look at numbers, which it does on its device."""

        def call(*args: Any, **kwargs: Any) -> Tensor:
            recording = self._recording
            if recording is None:
                return function(*args, **kwargs)
            recording.is_within_kernel = True
            try:
                out = function(*args, **kwargs)
            finally:
                recording.is_within_kernel = False
            recording.note(function, args, kwargs, out)
            return out

        return call
