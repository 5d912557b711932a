"""What a request changes in the model's logits before the temperature: masks, penalties, bias.

Letters: R rows, V vocabulary, N places: pairs of a row and a token id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.sampling.row import SampledRow
from headrace.engine.transfer import on_device, upload

_MAX_LOGIT = torch.finfo(torch.float32).max
_NUM_REMEMBERED = 64


def adjust(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    """Apply, in this order: constraint, allowed, banned and suppressed ids and bad words, repetition penalty,
    frequency and presence penalties, bias. Costs as much as there are places, never vocabulary times history.

    Args:
        logits: (R, V), fp32; changed in place.
        rows: R of them.
    """
    _keep_within_constraint(logits, rows)
    _mask(logits, rows)
    _penalise_repetition(logits, rows)
    _penalise_output(logits, rows)
    _add_bias(logits, rows)


def completed_bad_words(row: SampledRow) -> Iterator[int]:
    """Tokens that would complete a bad word now: its last one, where the ones before it stand already."""
    known = row.known_token_ids
    for *beginning, last in row.params.bad_words:
        num_before = len(beginning)
        if num_before <= len(known) and list(known[len(known) - num_before :]) == beginning:
            yield last


def _keep_within_constraint(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    if all(row.allowed_bits is None for row in rows):
        return
    vocab_size = logits.shape[1]
    num_bytes = -(-vocab_size // 8)
    packed = b"".join(
        b"\xff" * num_bytes if row.allowed_bits is None else row.allowed_bits.ljust(num_bytes, b"\0")
        for row in rows
    )
    # The bits travel to the device as they are; eight addends for each byte lie there.
    places = _to(np.frombuffer(packed, np.uint8), logits.device)
    masks = _addends_of_bytes(logits.device)[places.long()].view(len(rows), 8 * num_bytes)
    logits += masks[:, :vocab_size]


def _mask(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    masked: list[tuple[int, Tensor]] = []
    for i, row in enumerate(rows):
        params = row.params
        if params.allowed_token_ids is not None or params.banned_token_ids:
            # Impossible tokens stay so, whatever is added to them.
            logits[i] += _lasting_mask(
                params.allowed_token_ids, params.banned_token_ids, logits.shape[1], logits.device
            )
        passing = row.suppressed_token_ids.union(completed_bad_words(row))
        if passing:
            masked.append((i, on_device(sorted(passing), logits.device)))
    if masked:
        logits[_places(masked, logits.device)] = -math.inf


def _penalise_repetition(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    repeating = [(i, row) for i, row in enumerate(rows) if row.params.repetition_penalty != 1]
    if not repeating:
        return
    place_rows, token_ids = _history([(i, row.known_token_ids) for i, row in repeating])
    penalties = np.ones(len(rows))
    for i, row in repeating:
        penalties[i] = row.params.repetition_penalty
    # A token that stands there twice is written twice, with the same value: both come from what was read.
    places = _to(place_rows, logits.device), _to(token_ids, logits.device)
    factor = _to(penalties[place_rows], logits.device)
    read = logits[places].double()
    penalised = torch.where(read > 0, read / factor, read * factor)
    logits[places] = penalised.clamp_(max=_MAX_LOGIT).float()


def _penalise_output(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    counting = [
        (i, row)
        for i, row in enumerate(rows)
        if row.params.frequency_penalty != 0 or row.params.presence_penalty != 0
    ]
    if not counting:
        return
    vocab_size = logits.shape[1]
    place_rows, token_ids = _history(
        [(i, row.known_token_ids[row.num_prompt_tokens :]) for i, row in counting]
    )
    keys, counts = np.unique(place_rows * vocab_size + token_ids, return_counts=True)
    per_time, at_all = np.zeros(len(rows)), np.zeros(len(rows))
    for i, row in counting:
        per_time[i], at_all[i] = row.params.frequency_penalty, row.params.presence_penalty
    key_rows = keys // vocab_size
    amounts = per_time[key_rows] * counts + at_all[key_rows]
    places = _to(key_rows, logits.device), _to(keys % vocab_size, logits.device)
    logits[places] = (logits[places].double() - _to(amounts, logits.device)).float()


def _add_bias(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    biased = [
        (i, *_bias_tensors(row.params.logit_bias, logits.device))
        for i, row in enumerate(rows)
        if row.params.logit_bias
    ]
    if biased:
        places = _places([(i, token_ids) for i, token_ids, _ in biased], logits.device)
        logits[places] += torch.cat([bias for _, _, bias in biased])


def _places(token_ids_of: Sequence[tuple[int, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Two of (N,), int64: rows and token ids, from pairs of a row and its token ids."""
    lens = [token_ids.shape[0] for _, token_ids in token_ids_of]
    rows = np.repeat(np.array([i for i, _ in token_ids_of], np.int64), lens)
    return _to(rows, device), torch.cat([token_ids for _, token_ids in token_ids_of])


def _history(tokens_of: Sequence[tuple[int, Sequence[int]]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two of (N,): the same from tokens that stand in a text, each as often as it does."""
    lens = [len(token_ids) for _, token_ids in tokens_of]
    rows = np.repeat(np.array([i for i, _ in tokens_of], np.int64), lens)
    token_ids = chain.from_iterable(token_ids for _, token_ids in tokens_of)
    return rows, np.fromiter(token_ids, np.int64, sum(lens))


def _to(array: NDArray[np.int64] | NDArray[np.float64] | NDArray[np.uint8], device: torch.device) -> Tensor:
    return on_device(array, device)


# A request says the same at each of its steps: what it says is laid out once.


@lru_cache(8)
def _addends_of_bytes(device: torch.device) -> Tensor:
    """(256, 8), fp32: 0 where the byte's bit is set, from the lowest, and -inf where it isn't."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return on_device(np.where(bits == 1, np.float32(0), np.float32(-math.inf)), device)


@lru_cache(_NUM_REMEMBERED)
def _lasting_mask(
    allowed: frozenset[int] | None, banned: frozenset[int], vocab_size: int, device: torch.device
) -> Tensor:
    """(V,), fp32: 0 for a token that may be drawn, -inf for one that may not."""
    mask = torch.zeros(vocab_size)
    if allowed is not None:
        mask.fill_(-math.inf)
        mask[sorted(allowed)] = 0.0
    mask[sorted(banned)] = -math.inf
    return upload((mask,), device)[0]


@lru_cache(_NUM_REMEMBERED)
def _bias_tensors(logit_bias: tuple[tuple[int, float], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids, each once, and the sum of what is added to each."""
    bias: dict[int, float] = {}
    for token_id, amount in logit_bias:
        bias[token_id] = bias.get(token_id, 0.0) + amount
    return (
        on_device(list(bias), device, torch.int64),
        on_device(list(bias.values()), device, torch.float32),
    )
