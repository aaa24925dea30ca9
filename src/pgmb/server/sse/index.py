"""Which readers ask for an event: found by its topic and the values of its fields. No I/O."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeAlias, TypeVar

from pgmb.server.sse.interest import Document, Interest, Path, Question, Values, values_of
from pgmb.server.sse.topics import Topics
from pgmb.types import Event

Reader = TypeVar("Reader", bound=Hashable)

_ByValues: TypeAlias = dict[Values, dict[Question | None, set[Reader]]]
_ByFields: TypeAlias = dict[tuple[Path, ...], "_ByValues[Reader]"]


class Index(Generic[Reader]):
    """Readers under their patterns, then under the fields that they compare, the values, and the filter."""

    def __init__(self) -> None:
        self._topics: Topics[tuple[str, ...]] = Topics()
        self._patterns: dict[tuple[str, ...], _ByFields[Reader]] = {}

    def add(self, reader: Reader, interest: Interest) -> None:
        if interest.patterns not in self._patterns:
            self._patterns[interest.patterns] = {}
            for pattern in interest.patterns:
                self._topics.add(pattern, interest.patterns)
        by_values = self._patterns[interest.patterns].setdefault(interest.fields, {})
        by_values.setdefault(interest.values, {}).setdefault(interest.question, set()).add(reader)

    def remove(self, reader: Reader, interest: Interest) -> None:
        """Takes a reader out. What nobody asks for any more leaves nothing behind."""
        by_fields = self._patterns.get(interest.patterns, {})
        by_values = by_fields.get(interest.fields, {})
        by_question = by_values.get(interest.values, {})
        readers = by_question.get(interest.question, set())
        if reader not in readers:
            return
        readers.discard(reader)
        if not readers:
            del by_question[interest.question]
        if not by_question:
            del by_values[interest.values]
        if not by_values:
            del by_fields[interest.fields]
        if not by_fields:
            del self._patterns[interest.patterns]
            for pattern in interest.patterns:
                self._topics.remove(pattern, interest.patterns)

    def matching(
        self, event: Event, document: Document, passing: Mapping[Question, set[int]] | None = None
    ) -> Iterator[set[Reader]]:
        """Sets of readers that ask for an event. `passing`: the numbers of events that pass each filter."""
        for patterns in self._topics.matching(event.topic):
            for fields, by_values in self._patterns[patterns].items():
                values = values_of(event, document, fields)
                for question, readers in by_values.get(values, {}).items():
                    if question is None or (passing is not None and event.seq in passing.get(question, ())):
                        yield readers
