"""The databases that a query reads, by the home of their positions."""

from __future__ import annotations

from collections.abc import ItemsView
from contextlib import ExitStack
from typing import Self

from pgmb._core.cursor import ReadCursor
from pgmb.spark.source.log import Frontier, Log
from pgmb.spark.source.offsets import Mark, Offset
from pgmb.spark.source.options import ReadOptions, offsets_given


class Shards:
    """The logs of a query. Connects to each, to learn whose positions it has."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._logs: dict[str, Log] = {}
        self._read_urls: dict[str, str] = {}
        with ExitStack() as undo:
            for url, read_url in zip(options.urls, options.read_urls, strict=True):
                log = Log(url, options.stream, options.fail_on_data_loss)
                undo.callback(log.close)
                if log.home in self._logs:
                    raise ValueError(f"url names the database {log.home} twice")
                self._logs[log.home] = log
                self._read_urls[log.home] = read_url
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, home: str) -> Log:
        return self._logs[home]

    def __len__(self) -> int:
        return len(self._logs)

    def items(self) -> ItemsView[str, Log]:
        return self._logs.items()

    def read_url(self, home: str) -> str:
        """Where the events of a shard are read."""
        return self._read_urls[home]

    def matching(self, patterns: list[str]) -> str:
        """The condition that topic patterns make: the same in every shard."""
        return next(iter(self._logs.values())).matching(patterns)

    def first(self, given: str) -> Offset:
        """The offset that earliest, latest, JSON or startingTimestamp stand for."""
        named = offsets_given(given)
        if named is not None and "v" in named:
            return self.known(Offset.parse(named))
        return Offset(
            self._options.stream,
            {home: self._mark(home, given, named) for home in self._logs},
        )

    def known(self, offset: Offset) -> Offset:
        """The same offset, with shards added since from their earliest event on, as Kafka's source takes new
        partitions; or an error that says what differs."""
        if offset.stream != self._options.stream:
            raise ValueError(
                f"the checkpoint is of stream {offset.stream}, the query reads {self._options.stream}: "
                "start it with a new checkpoint"
            )
        strange = [home for home in offset.shards if home not in self._logs]
        if strange:
            raise ValueError(
                f"the checkpoint stands in {', '.join(strange)} (installation and database), but "
                f"url leads to {', '.join(self._logs)}: a database that was restored or copied, or another. "
                "Positions belong to the cluster that gave them: start the query with a new checkpoint"
            )
        added = [home for home in self._logs if home not in offset.shards]
        if not added:
            return offset
        marks = {home: Mark(self._logs[home].earliest()) for home in added}
        return Offset(offset.stream, {**offset.shards, **marks})

    def frontier_at(self, home: str, mark: Mark) -> Frontier:
        """The frontier at a position that was given."""
        now = self._logs[home].frontier()
        return Frontier(mark.done, now.last)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()

    def _mark(self, home: str, given: str, named: dict[str, object] | None) -> Mark:
        log = self._logs[home]
        if self._options.since is not None:
            return Mark(log.at(self._options.since), since=self._options.since)
        if named is not None:
            text = named.get(home, named.get(self._options.stream))
            if not isinstance(text, str):
                raise ValueError(f"offsets as JSON name a position for {self._options.stream}, or for {home}")
            place = ReadCursor.parse(text)
            if place.batch is not None:
                raise ValueError("offsets as JSON are positions, not places within a batch")
            return Mark(str(place.done))
        if given == "earliest":
            return Mark(log.earliest())
        if given == "latest":
            return Mark(log.frontier().position)
        raise ValueError(f"offsets are earliest, latest or JSON, not {given!r}")
