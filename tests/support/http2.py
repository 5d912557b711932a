"""HTTP/2 as bytes, for clients that no library would be: what they send may be wrong on purpose.

RFC 9113 for frames, RFC 7541 for header fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1

NO_ERROR, CANCEL, ENHANCE_YOUR_CALM = 0, 8, 11
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame, whether it makes sense or not."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def settings(initial_window_size: int | None = None) -> bytes:
    """The settings that a client begins with.

    Args:
        initial_window_size: bytes of an answer that it takes before it asks for more.
    """
    payload = b""
    if initial_window_size is not None:
        payload = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + initial_window_size.to_bytes(4, "big")
    return frame(SETTINGS, 0, 0, payload)


def ping(number: int = 0) -> bytes:
    """A ping that wants an answer."""
    return frame(PING, 0, 0, number.to_bytes(8, "big"))


def reset(stream: int, code: int = CANCEL) -> bytes:
    """The end of a stream from the client's side."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def header_block(fields: Mapping[bytes, bytes]) -> bytes:
    """Header fields, neither indexed nor compressed."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in fields.items())


def _string(value: bytes) -> bytes:
    # An integer with a prefix of seven bits; the eighth, for Huffman's code, stays 0.
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, size = len(value) - 127, b"\x7f"
    while rest >= 128:
        size += bytes([rest % 128 + 128])
        rest //= 128
    return size + bytes([rest]) + value


def call_headers(
    stream: int, path: bytes, *, flags: int = END_HEADERS, more: Mapping[bytes, bytes] | None = None
) -> bytes:
    """The frame that opens a gRPC call.

    Args:
        stream: odd, and higher than any before it on its connection.
        more: further fields, or others in place of the usual ones.
    """
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x"}
    fields |= {b"content-type": b"application/grpc", b"te": b"trailers", **(more or {})}
    return frame(HEADERS, flags, stream, header_block(fields))


def header_bomb(stream: int, path: bytes, num_copies: int) -> bytes:
    """A call whose short header block means many fields of 2 kB: one is remembered, then referred to."""
    block = header_block({b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x"})
    remembered = b"\x40" + _string(b"a") + _string(b"b" * 2000)
    return frame(HEADERS, END_HEADERS, stream, block + remembered + b"\xbe" * num_copies)


def message(stream: int, encoded: bytes, *, flags: int = END_STREAM) -> bytes:
    """A frame with one gRPC message, not compressed."""
    return frame(DATA, flags, stream, b"\x00" + len(encoded).to_bytes(4, "big") + encoded)


def opening() -> bytes:
    """What a client that means well sends first."""
    return PREFACE + settings()


class FrameCounter:
    """Counts the frames that one side of a connection sends, whatever pieces they come in.

    Args:
        is_client: whether it is the side that sends `PREFACE` first.
    """

    def __init__(self, *, is_client: bool) -> None:
        self.kinds: Counter[int] = Counter()
        self.num_pings = 0
        """Those that want an answer."""
        self._rest = b""
        self._num_skipped = len(PREFACE) if is_client else 0

    def feed(self, data: bytes) -> None:
        """Count on."""
        self._rest += data
        while len(self._rest) >= self._num_skipped + 9:
            head = self._rest[self._num_skipped : self._num_skipped + 9]
            self._rest = self._rest[self._num_skipped + 9 :]
            self._num_skipped = int.from_bytes(head[:3], "big")
            self.kinds[head[3]] += 1
            self.num_pings += head[3] == PING and not head[4] & ACK
        skipped = min(self._num_skipped, len(self._rest))
        self._rest, self._num_skipped = self._rest[skipped:], self._num_skipped - skipped
