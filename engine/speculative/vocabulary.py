"""Whether two models mean the same tokens by their ids: tables are compared, not sizes."""

from __future__ import annotations

from headrace.engine.errors import ConfigError
from headrace.engine.tokenizer import Tokenizer


def num_common_ids(
    target: Tokenizer, target_size: int, draft: Tokenizer, draft_size: int, draft_name: str
) -> int:
    """So many ids, from 0 on, mean the same to both models. Beyond them lie padding and tokens of one alone.

    Args:
        target_size, draft_size: rows of each model's embedding: often padded beyond what its tokenizer knows.
        draft_name: what a person calls the draft model.

    Raises:
        ConfigError: an id that both know means different tokens; it names the first one.
    """
    ids = range(min(target_size, draft_size))
    num_common = 0
    for token_id, ours, theirs in zip(ids, target.spellings(ids), draft.spellings(ids), strict=True):
        if not ours or not theirs:
            continue
        if ours != theirs:
            raise ConfigError(
                f"the draft model {draft_name} has another vocabulary: token {token_id} is {theirs!r} there "
                f"and {ours!r} in the model that it is to draft for. Use one of the same family, or none"
            )
        num_common = token_id + 1
    if num_common == 0:
        raise ConfigError(f"the draft model {draft_name} has no token in common with the model")
    return num_common
