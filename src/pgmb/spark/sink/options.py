"""What a writer may be asked for, by the habits of Spark, Kafka's sink and Delta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, cast

import msgspec

from pgmb.spark.given import Given

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
    def of(cls, options: Mapping[str, str], streaming: bool) -> WriteOptions:
        given = Given(options, KNOWN, _OF_SPARK)
        url = (given.text("url") or "").strip()
        if not url or url.startswith("[") or "\n" in url:
            raise ValueError('writing to pgmb needs .option("url", "postgresql://…"), one database')
        guarantee = given.one_of("deliveryGuarantee", "exactly-once", "at-least-once")
        committed = given.one_of("commitMode", "staged", "direct")
        if guarantee == "at-least-once" and "commitMode" in given:
            raise ValueError(
                "commitMode is about exactly-once: leave it out with deliveryGuarantee=at-least-once"
            )
        app, version = given.text("txnAppId"), _version(given.text("txnVersion"))
        if app is not None and not 0 < len(app) <= 500:
            raise ValueError("txnAppId is a name of 1 to 500 characters")
        if streaming and version is not None:
            raise ValueError("txnVersion is for batch writes: the version of a stream is its batch")
        if not streaming and (app is None) != (version is None):
            raise ValueError("txnAppId and txnVersion go together")
        named = {name: given.text(f"{name}Column") for name in COLUMNS}
        return cls(
            url=url,
            stream=given.text("stream") or given.text("path") or "main",
            topic=given.text("topic"),
            key=given.text("key"),
            columns={name: name if column is None else column for name, column in named.items()},
            mode=cast("Mode", committed if guarantee == "exactly-once" else guarantee),
            app=app,
            version=version,
        )


def _version(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) >= 2**63:
        raise ValueError(f"txnVersion is a number from 0, not {text!r}")
    return int(text)
