"""Patterns as a tree of words, so that a topic finds those that it matches without asking each. No I/O."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class _Node(Generic[Item]):
    __slots__ = ("below", "is_hash", "items")

    def __init__(self, is_hash: bool = False) -> None:
        self.is_hash = is_hash
        self.below: dict[str, _Node[Item]] = {}
        self.items: set[Item] = set()


class Topics(Generic[Item]):
    """Things under patterns; `matching` agrees with `pgmb.patterns.matches`."""

    def __init__(self) -> None:
        self._root: _Node[Item] = _Node()

    def add(self, pattern: str, item: Item) -> None:
        node = self._root
        for word in pattern.split("."):
            if word not in node.below:
                node.below[word] = _Node(word == "#")
            node = node.below[word]
        node.items.add(item)

    def remove(self, pattern: str, item: Item) -> None:
        """Takes it away, with the branch that nothing else is on."""
        way = [self._root]
        words = pattern.split(".")
        for word in words:
            found = way[-1].below.get(word)
            if found is None:
                return
            way.append(found)
        way[-1].items.discard(item)
        while words and not way[-1].items and not way[-1].below:
            way.pop()
            del way[-1].below[words.pop()]

    def matching(self, topic: str) -> set[Item]:
        """What stands under the patterns that a topic matches."""
        nodes = _with_hashes({self._root})
        for word in topic.split("."):
            reached: set[_Node[Item]] = set()
            for node in nodes:
                if node.is_hash:
                    # It takes this word too, and stays where it is.
                    reached.add(node)
                if "*" in node.below:
                    reached.add(node.below["*"])
                # A topic's own * or # is a word like others, which no pattern can name.
                if word not in ("*", "#") and word in node.below:
                    reached.add(node.below[word])
            nodes = _with_hashes(reached)
        return {item for node in nodes for item in node.items}


def _with_hashes(nodes: set[_Node[Item]]) -> set[_Node[Item]]:
    """And what is reached from there by a # that stands for no word."""
    reached = set(nodes)
    fresh = list(nodes)
    while fresh:
        below = fresh.pop().below.get("#")
        if below is not None and below not in reached:
            reached.add(below)
            fresh.append(below)
    return reached
