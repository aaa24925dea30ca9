"""What a writer may be asked for, by the habits of Spark, Kafka's sink and Delta."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, cast

import msgspec

Mode: TypeAlias = Literal["staged", "direct", "at-least-once"]

COLUMNS: Final = ("topic", "key", "payload", "headers", "id", "at")
"""What a column may be, and its name unless an option such as keyColumn names another."""

KNOWN: Final = (
    "url",
    "stream",
    "path",
    "topic",
    "key",
    *(f"{name}Column" for name in COLUMNS),
    "deliveryGuarantee",
    "commitMode",
    "txnAppId",
    "txnVersion",
)

_OF_SPARK: Final = ("checkpointlocation", "queryname")
"""Options that Spark itself takes and still hands on."""


class WriteOptions(msgspec.Struct, frozen=True):
    """The options of a write, checked.

    topic, key   of events whose column is NULL or missing
    columns      which column is what: the name of each of COLUMNS, "" for none
    mode         staged and direct are exactly once, by one transaction for all tasks or one for each
    app, version a version that an application has published is not published again
    """

    url: str
    stream: str = "main"
    topic: str | None = None
    key: str | None = None
    columns: dict[str, str] = {}
    mode: Mode = "staged"
    app: str | None = None
    version: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, str], streaming: bool) -> WriteOptions:
        options = {name.lower(): value for name, value in given.items()}
        _refuse_unknown(options)
        url = options.get("url", "").strip()
        if not url or url.startswith("[") or "\n" in url:
            raise ValueError('writing to pgmb needs .option("url", "postgresql://…"), one database')
        guarantee = _one_of(options, "deliveryGuarantee", "exactly-once", "at-least-once")
        committed = _one_of(options, "commitMode", "staged", "direct")
        if guarantee == "at-least-once" and "commitmode" in options:
            raise ValueError(
                "commitMode is about exactly-once: leave it out with deliveryGuarantee=at-least-once"
            )
        app, version = options.get("txnappid"), _version(options)
        if app is not None and not 0 < len(app) <= 500:
            raise ValueError("txnAppId is a name of 1 to 500 characters")
        if streaming and version is not None:
            raise ValueError("txnVersion is for batch writes: the version of a stream is its batch")
        if not streaming and (app is None) != (version is None):
            raise ValueError("txnAppId and txnVersion go together")
        return cls(
            url=url,
            stream=options.get("stream") or options.get("path") or "main",
            topic=options.get("topic"),
            key=options.get("key"),
            columns={name: options.get(f"{name}column", name) for name in COLUMNS},
            mode=cast("Mode", committed if guarantee == "exactly-once" else guarantee),
            app=app,
            version=version,
        )


def _refuse_unknown(options: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in KNOWN}
    for name in options:
        if name not in known and name not in _OF_SPARK:
            near = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {known[near[0]]}?" if near else f"; there are {', '.join(KNOWN)}"
            raise ValueError(f"pgmb does not know the option {name}{hint}")


def _one_of(options: Mapping[str, str], name: str, *allowed: str) -> str:
    """The first of those allowed is the default."""
    value = options.get(name.lower(), allowed[0]).strip().lower()
    if value not in allowed:
        raise ValueError(f"{name} is {' or '.join(allowed)}, not {value!r}")
    return value


def _version(options: Mapping[str, str]) -> int | None:
    text = options.get("txnversion")
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) >= 2**63:
        raise ValueError(f"txnVersion is a number from 0, not {text!r}")
    return int(text)
