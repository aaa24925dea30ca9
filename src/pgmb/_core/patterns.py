"""Topic patterns, matched as pgmb.matches does in the database."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache

from pgmb.errors import InvalidArgument


def matches(pattern: str, topic: str) -> bool:
    """Whether a topic matches a pattern: words with dots between, * is one word, # any number of words."""
    return compiled(pattern).fullmatch(topic) is not None


@lru_cache(maxsize=1000)
def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression that a whole topic must match. InvalidArgument if it is not a pattern."""
    words = pattern.split(".")
    if not pattern or any(len(word) > 1 and ("*" in word or "#" in word) for word in words):
        refused = InvalidArgument(f"invalid pattern: {pattern!r}")
        refused.advise("* and # stand for whole words: order.*, order.#, *.created.")
        raise refused
    text = ""
    while words and words[0] == "#":
        del words[0]
        text = r"(?:[^.]*\.)*"
    if not words:
        return re.compile(r"(?s:.*)")
    for position, word in enumerate(words):
        if word == "#":
            text += r"(?:\.[^.]*)*"
            continue
        text += r"\." if position else ""
        text += "[^.]*" if word == "*" else re.escape(word)
    return re.compile(text)


class TopicHints:
    """Whether patterns may match the topics that a tick hints at (pgmb_internal.topic_hints)."""

    def __init__(self, patterns: Iterable[str], salt: int) -> None:
        self._all = False
        self._first_words: set[str] = set()
        self._topics: set[str] = set()
        for pattern in patterns:
            words = pattern.split(".")
            if words[0] in ("*", "#"):
                self._all = True
            elif "*" in words or "#" in words:
                self._first_words.add(_hint(words[0], salt))
            else:
                self._topics.add(_hint(pattern, salt))

    def may_match(self, hints: str) -> bool:
        """Whether one of these topics may match."""
        return self._all or any(
            hint[:4] in self._first_words or hint[4:] in self._topics for hint in hints.split()
        )


def _hint(text: str, salt: int) -> str:
    return hashlib.sha256(f"{salt} {text}".encode()).hexdigest()[:4]
