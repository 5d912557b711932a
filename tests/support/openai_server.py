"""A tiny server of the OpenAI protocol: real sockets, scripted answers, no library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

DONE = "data: [DONE]\n\n"


def event(**fields: object) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(fields)}\n\n"


def said(text: str, finish_reason: str | None = None) -> str:
    """A chunk of a completion."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


def chatted(content: str, finish_reason: str | None = None) -> str:
    """A chunk of a chat."""
    return event(choices=[{"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}])


def used(prompt_tokens: int, completion_tokens: int, **more: object) -> str:
    """The last chunk, which has the counts."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **more}
    return event(choices=[], usage=usage)


@dataclass
class Reply:
    """What the server answers.

    Args:
        pieces: sent one by one, cut wherever the test wants them cut.
        is_cut: the connection is closed without the end of the body.
    """

    pieces: Sequence[str] = ()
    status: int = 200
    is_cut: bool = False


@dataclass
class OpenAiServer:
    """A running one: where it is, and what it was asked.

    Args:
        bodies: of every POST. `headers`: of every request, names in lower case.
    """

    reply: Reply
    url: str = ""
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, path, _ = first.split(" ")
        self.paths.append(path)
        self.headers.append(headers)
        reply = self.reply
        if method == "POST":
            self.bodies.append(json.loads(await reader.readexactly(int(headers["content-length"]))))
        elif path == "/v1/models" and reply.status == 200:
            reply = Reply([json.dumps({"data": [{"id": "tiny"}]})])
        writer.write(f"HTTP/1.1 {reply.status} Said\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in reply.pieces:
            data = piece.encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(0)
        if not reply.is_cut:
            writer.write(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def running_openai_server(
    *pieces: str, status: int = 200, is_cut: bool = False
) -> AsyncIterator[OpenAiServer]:
    """Serve on a free loopback port."""
    told = OpenAiServer(Reply(pieces, status, is_cut))
    server = await asyncio.start_server(told.handle, "127.0.0.1", 0)
    told.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield told
