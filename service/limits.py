"""Hard bounds of what a request may hold: each is checked in O(size), before any work is done for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")
MAX_REQUEST_ID_LEN = 128
MAX_DETAILED_VIOLATIONS = 16
"""A status travels in HTTP/2 trailers, which peers bound to some kilobytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request, or one RPC, may hold.

    Args:
        max_message_bytes: longest protobuf message, either way; enforced by gRPC itself. Clients of ours have
            the same limit.
        max_metadata_bytes: longest metadata of one RPC.
        max_concurrent_streams: RPCs that one connection may have open; more wait at the client.
        max_text_bytes: longest raw text, and longest whole conversation.
        max_messages, max_tools: parts of a conversation.
        max_stop_token_ids: stop ids of one request.
        max_stop_strings, max_stop_string_bytes: stop strings of one request, and the size of each.
        max_sequences: sequences of one request, told or not.
        min_priority, max_priority: lowest and highest priority that a request may ask for.
        max_logit_biases: token ids whose logit one request changes.
        max_listed_token_ids: ids of a list of allowed or banned ones.
        max_bad_words, max_bad_word_bytes: bad words of one request, and the size of each.
        max_logprobs: likeliest tokens that are told beside each one.
        max_request_logprobs: logprobs, chosen and likeliest ones counted, that one request may come to have.
        max_cache_salt_len: characters of a cache salt.
        max_detokenized_ids: ids of one Detokenize call.
        max_request_s: longest time that any request may take, queueing included, seconds.
        max_pending_texts: texts that wait for a tokenizer thread; one more is refused as overload.
        max_pending_text_bytes: their size together.
        max_session_backlog: answers of one Session that wait for its reader, or starts that wait to be
            encoded, before its messages wait too.
        max_session_backlog_bytes: size of the starts that wait to be encoded, before the same happens.
        max_remembered_labels: ended requests that one Session tells from ids that it has never seen.
        keepalive_s, keepalive_timeout_s: after so long without a word a peer is asked for a sign of life, and
            has so long to give one, seconds; else its connection is closed, and its calls end.
        min_ping_interval_s: a peer that asks for signs of life more often, with nothing else said, is hung up
            on after some times, seconds.
        slow_reader_s: longest time that one message may wait for its reader before the RPC is cut, and that a
            request may wait for credit or acknowledgement before it is given up, seconds.
        max_unread_bytes: most output that may wait for the reader of one Session before it is cut.
        detach_grace_s: how long a request that was started with `detach` may be resumed after its stream has
            broken, or has told it to its end, seconds.
        detach_buffer_bytes: most events of such a request that are sent and not acknowledged.
        max_resumable: most such requests of all clients together.
    """

    max_message_bytes: int = 16 * 2**20
    max_metadata_bytes: int = 16 * 2**10
    max_concurrent_streams: int = 4096
    max_text_bytes: int = 2 * 2**20
    max_messages: int = 1024
    max_tools: int = 128
    max_stop_token_ids: int = 256
    max_stop_strings: int = 32
    max_stop_string_bytes: int = 1024
    max_sequences: int = 128
    min_priority: int = -100
    max_priority: int = 100
    max_logit_biases: int = 1024
    max_listed_token_ids: int = 16_384
    max_bad_words: int = 128
    max_bad_word_bytes: int = 256
    max_logprobs: int = 64
    max_request_logprobs: int = 2**19
    max_cache_salt_len: int = 256
    max_detokenized_ids: int = 131_072
    max_request_s: float = 3600.0
    max_pending_texts: int = 1024
    max_pending_text_bytes: int = 64 * 2**20
    max_session_backlog: int = 1024
    max_session_backlog_bytes: int = 16 * 2**20
    max_remembered_labels: int = 16_384
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    min_ping_interval_s: float = 5.0
    slow_reader_s: float = 60.0
    max_unread_bytes: int = 64 * 2**20
    detach_grace_s: float = 60.0
    detach_buffer_bytes: int = 2**20
    max_resumable: int = 512

    @property
    def max_rendered_bytes(self) -> int:
        """Longest text that a model's chat template may make of a conversation: it adds markers, and writes
        tools in longer words than they came in."""
        return 4 * self.max_text_bytes


def is_valid_request_id(label: str) -> bool:
    """Whether `label` is 1 to 128 printable ASCII characters."""
    return _REQUEST_ID.fullmatch(label) is not None
