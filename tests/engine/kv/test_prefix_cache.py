import pytest

from headrace.engine.errors import IntegrityError
from headrace.engine.kv.prefix_cache import BlockKey, PrefixCache, chain_root, next_key

ROOT = chain_root("")


def test_a_block_is_found_by_its_content_and_everything_before_it():
    cache = PrefixCache()
    first = next_key(ROOT, [1, 2])
    second = next_key(first[0], [3, 4])
    assert cache.add(first, 7)
    assert cache.add(second, 8)
    assert cache.find(next_key(ROOT, [1, 2])) == 7
    assert cache.find(next_key(first[0], [3, 4])) == 8
    assert cache.find(next_key(ROOT, [3, 4])) is None, "the same ids behind another beginning"


@pytest.mark.parametrize(
    ("ids", "others"),
    [([1, 23], [12, 3]), ([1, 2, 3], [1, 3, 2]), ([10, 20], [41, 19]), ([0], [0, 0]), ([-1], [2**63 - 1])],
)
def test_different_ids_have_different_keys(ids, others):
    assert next_key(ROOT, ids)[0] != next_key(ROOT, others)[0]


def test_isolation_keys_share_nothing():
    assert chain_root("tenant a") != chain_root("tenant b")
    cache = PrefixCache()
    cache.add(next_key(chain_root("tenant a"), [1]), 1)
    assert cache.find(next_key(chain_root("tenant b"), [1])) is None


def test_a_hit_compares_the_ids_behind_the_hash():
    cache = PrefixCache()

    def colliding(parent: bytes, token_ids: list[int]) -> BlockKey:
        return b"collision", next_key(parent, token_ids)[1]

    cache.add(colliding(ROOT, [1, 2]), 5)
    assert cache.find(colliding(ROOT, [1, 2])) == 5
    assert cache.find(colliding(ROOT, [32, 1])) is None
    assert cache.find(colliding(chain_root("another"), [1, 2])) is None


def test_content_that_is_known_is_not_replaced():
    cache = PrefixCache()
    key = next_key(ROOT, [1])
    assert cache.add(key, 1)
    assert not cache.add(key, 2)
    assert cache.find(key) == 1
    assert not cache.forget(2)


def test_a_forgotten_block_is_not_found_and_may_hold_something_else():
    cache = PrefixCache()
    key = next_key(ROOT, [1])
    cache.add(key, 1)
    assert cache.forget(1)
    assert cache.find(key) is None
    assert cache.add(next_key(ROOT, [2]), 1)
    assert len(cache) == 1


def test_a_block_has_one_content():
    cache = PrefixCache()
    cache.add(next_key(ROOT, [1]), 1)
    with pytest.raises(IntegrityError, match="under another key"):
        cache.add(next_key(ROOT, [2]), 1)
