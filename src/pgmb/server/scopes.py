"""What a key may do: scopes, and whether they cover something. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

import msgspec

Verb: TypeAlias = Literal["publish", "read", "consume", "inspect", "operate"]

ALL: Final = "*"


def covers(scopes: Iterable[str], verb: Verb, name: str | None = None) -> bool:
    """Whether scopes allow something: `operate` allows all, `inspect` to read all."""
    held = set(scopes)
    if "operate" in held or verb in held:
        return True
    if verb == "read" and "inspect" in held:
        return True
    return name is not None and (f"{verb}:{name}" in held or f"{verb}:{ALL}" in held)


class Principal(msgspec.Struct, frozen=True):
    """Who asks: a key, by itself or by a pass that was handed out on its behalf."""

    key: int
    name: str
    scopes: frozenset[str]
    kind: Literal["key", "session", "ticket"] = "key"
    csrf: str | None = None
    """What a form of this session has to bring."""
    session: bytes | None = None
    """The digest of the session."""

    def may(self, verb: Verb, name: str | None = None) -> bool:
        return covers(self.scopes, verb, name)

    def may_all(self, scopes: Iterable[str]) -> bool:
        """Whether it may hand these scopes on."""
        for scope in scopes:
            verb, _, name = scope.partition(":")
            if not covers(self.scopes, verb, name or None):  # type: ignore[arg-type]
                return False
        return True
