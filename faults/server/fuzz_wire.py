"""Raw connections to a server: requests one after another without waiting, and what comes back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from faults.server.fuzz_requests import Made

NEVER: Final = 0
"""The status of what was never answered."""
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ENDLESS: Final = re.compile(
    rb"\r\n(?:transfer-encoding: *chunked|content-type: *text/event-stream)", re.IGNORECASE
)
_CLOSES: Final = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_STATUS: Final = re.compile(rb"(?:^|\r\n|\})HTTP/1\.1 (\d{3})")
_LONGEST: Final = 64 << 20
_ANSWERED_WITHIN: Final = 30.0
_QUIET_AFTER: Final = 0.15
"""Seconds after which nothing more is expected of what was malformed."""


class Answer(NamedTuple):
    made: Made
    status: int
    text: bytes
    """Head and body."""


class Connection:
    """One at a time to a server, made anew when it was closed."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, several: Sequence[Made]) -> list[Answer]:
        """The answers to requests sent at once. Fewer, if the server closed the connection before."""
        reader, writer = await self._open()
        answers: list[Answer] = []
        try:
            async with asyncio.timeout(_ANSWERED_WITHIN):
                writer.write(b"".join(made.data for made in several))
                for made in several:
                    head = await reader.readuntil(b"\r\n\r\n")
                    while head[9:10] == b"1":
                        head = await reader.readuntil(b"\r\n\r\n")
                    status = int(head[9:12])
                    length = _LENGTH.search(head)
                    body = b""
                    if not made.head and length is not None:
                        body = await reader.readexactly(int(length[1]))
                    answers.append(Answer(made, status, head + body))
                    if made.last or _CLOSES.search(head) or _ENDLESS.search(head):
                        # A stream has no end.
                        await self.close()
                        break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            await self.close()
        except TimeoutError:
            await self.close()
            # What came before it may be why.
            sent = b" then ".join(made.data[:300] for made in several[: len(answers)])
            answers.append(Answer(several[len(answers)], NEVER, sent))
        except BaseException:
            await self.close()
            raise
        return answers

    async def provoke(self, made: Made) -> list[Answer]:
        """Whatever comes back of a request that has no clear end."""
        await self.close()
        reader, writer = await self._open()
        got = b""
        try:
            writer.write(made.data)
            while len(got) < _LONGEST:
                async with asyncio.timeout(_QUIET_AFTER):
                    part = await reader.read(1 << 16)
                if not part:
                    break
                got += part
        except (TimeoutError, ConnectionError):
            pass
        finally:
            await self.close()
        return [Answer(made, int(found[1]), got) for found in _STATUS.finditer(got)]

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=1 << 20)
        return self._streams

    async def close(self) -> None:
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.transport.abort()
