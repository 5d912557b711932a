"""How backends on a GPU write K and V: through the slot mapping, before they attend."""

from __future__ import annotations

from torch import Tensor

from headrace.engine.kv.storage import KVStorage


class SlotWriter:
    """The cache as a list of slots per layer. Lays the views out once, not at every call."""

    def __init__(self, storage: KVStorage) -> None:
        self._keys = [layer.flatten(0, 1) for layer in storage.key]
        self._values = [layer.flatten(0, 1) for layer in storage.value]

    def write(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Store K and V of a step's tokens.

        Args:
            slot_mapping: (T,), int64; padding may name one slot of the null block many times.
            key, value: (T, H_kv, D), cache dtype, last axis contiguous.
        """
        self._keys[layer].index_copy_(0, slot_mapping, key)
        self._values[layer].index_copy_(0, slot_mapping, value)
