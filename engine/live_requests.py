"""The requests that are not over, and their sequences, by their ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from headrace.engine.config import ModelInfo
from headrace.engine.expiries import Expiries
from headrace.engine.live import LiveRequest, LiveSequence
from headrace.engine.scheduling.plan import ScheduledSequence
from headrace.engine.sequence import Request, RequestId, SequenceId, SequenceStatus
from headrace.engine.text import OutputText
from headrace.engine.tokenizer import Tokenizer


class LiveRequests:
    """Keeps account of them.

    Args:
        info: the served model.
        tokenizer: for the text of their sequences.
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._by_id: dict[RequestId, LiveRequest] = {}
        self._by_sequence: dict[SequenceId, LiveSequence] = {}
        self._sequence_ids = count()
        self._expiries = Expiries()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[LiveRequest]:
        """Those of now, whatever ends meanwhile."""
        return iter(list(self._by_id.values()))

    def __getitem__(self, request_id: RequestId) -> LiveRequest:
        return self._by_id[request_id]

    def begin(self, request: Request, max_len: int, now_s: float) -> list[LiveSequence]:
        """Take in a request whose id is not in use.

        Args:
            max_len: the longest that each of its sequences may become, tokens.

        Returns:
            Its sequences.
        """
        live = self._by_id[request.request_id] = LiveRequest(request)
        end_token_ids = request.stop.token_ids
        if not request.stop.ignore_eos:
            end_token_ids |= self._info.eos_token_ids
        is_constrained = request.constraint is not None
        for sequence in live.begin(max_len, end_token_ids, now_s, self._sequence_ids):
            text = OutputText(self._tokenizer, request.output, request.stop, is_constrained=is_constrained)
            live.open[sequence.index] = LiveSequence(sequence, text, live)
            self._by_sequence[sequence.sequence_id] = live.open[sequence.index]
        self._expiries.add(live, len(self._by_id))
        return list(live.open.values())

    def named(self, request_ids: Iterable[RequestId]) -> list[LiveRequest]:
        """Those of these ids that are live."""
        return [self._by_id[request_id] for request_id in request_ids if request_id in self._by_id]

    def sequences_of(self, request_ids: Iterable[RequestId]) -> list[LiveSequence]:
        """The sequences of `named` that are not over."""
        return [live for request in self.named(request_ids) for live in request.open.values()]

    def running(self, row: ScheduledSequence) -> LiveSequence | None:
        """Whose row it is; None once it is void. Nobody comes back to the batch while a row of it is under
        way, so who runs has run since it was planned."""
        live = self._by_sequence.get(row.sequence_id)
        return live if live is not None and live.sequence.status is SequenceStatus.RUNNING else None

    def forget_sequence(self, live: LiveSequence) -> None:
        """It is over."""
        del self._by_sequence[live.sequence.sequence_id]

    def forget(self, live: LiveRequest) -> None:
        """It is over, and so are all its sequences."""
        del self._by_id[live.request.request_id]

    @property
    def next_expiry_s(self) -> float | None:
        """When the next one expires, by the engine's clock; None for never."""
        return self._expiries.next_s

    def expired(self, now_s: float) -> Iterator[LiveRequest]:
        """Those whose time limit or deadline has passed; each is told of once."""
        return self._expiries.due(now_s)
