"""Which full blocks hold the KV of which beginning of a text.

A block is known by a hash chain: SHA-256 over the hash of the block before it, its own token ids, and at the
head of the chain the isolation key and the model. The ids are compared on every hit all the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

from headrace.engine.errors import IntegrityError

BlockKey = tuple[bytes, bytes]
"""Names the content of one full block: SHA-256 over it, and itself, which is the digest of the block before
it, or of the chain's root, and then the block's token ids. A tuple without a class of its own, which the
garbage collector stops looking at once it has seen what is in it: a pool has very many of them."""


def chain_root(isolation_key: str, model: str = "") -> bytes:
    """The digest that every chain of one isolation key and one model starts from."""
    name = model.encode()
    # The length says where the name ends, so no two pairs make the same text.
    return hashlib.sha256(b"headrace prefix %d " % len(name) + name + isolation_key.encode()).digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> BlockKey:
    """The key of a block that follows the block with digest `parent`."""
    content = parent + _packer(len(token_ids)).pack(*token_ids)
    return hashlib.sha256(content).digest(), content


@lru_cache(maxsize=8)
def _packer(num_tokens: int) -> struct.Struct:
    return struct.Struct(f"<{num_tokens}q")


class PrefixCache:
    """Full blocks by their keys. Holds no reference: it is told when a block's content is given up."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self.num_forgotten = 0
        """How often a block's content was given up: while it stays the same, what was found is still here."""

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, key: BlockKey) -> int | None:
        """The block with exactly this content, or None."""
        block_id = self._block_of.get(key[0])
        # Equal digests of unequal contents would be a broken hash; a user must not pay for it.
        return block_id if block_id is not None and self._key_of[block_id] == key else None

    def add(self, key: BlockKey, block_id: int) -> bool:
        """Let a block be found; False when the content is here already, under another block."""
        if block_id in self._key_of:
            raise IntegrityError(f"block {block_id} is known under another key already")
        digest, _ = key
        if digest in self._block_of:
            return False
        self._block_of[digest] = block_id
        self._key_of[block_id] = key
        return True

    def forget(self, block_id: int) -> bool:
        """The block's content is given up; False when it was never added."""
        key = self._key_of.pop(block_id, None)
        if key is None:
            return False
        del self._block_of[key[0]]
        self.num_forgotten += 1
        return True
