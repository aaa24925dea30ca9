"""Types of payloads, a value of each. `python -m tests.app.payload_types` prints the table of the docs."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fractions
import importlib
import ipaddress
import pathlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypedDict

import msgspec
import pydantic
import pydantic.dataclasses
from pydantic import AliasChoices, ConfigDict, Field, SecretBytes, SecretStr
from pydantic.alias_generators import to_camel

from pgmb._core import wire
from pgmb.app.payload import decoder
from pgmb.errors import InvalidArgument


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    A = "a"


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Data:
    a: int
    b: str = "x"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    a: int


class Keys(TypedDict):
    a: int
    b: NotRequired[str]


class Named(NamedTuple):
    a: int
    b: str


class Struct(msgspec.Struct):
    a: int


class Renamed(msgspec.Struct, rename="camel"):
    some_name: int


class Cat(msgspec.Struct, tag=True):
    a: int


class Dog(msgspec.Struct, tag=True):
    a: int


class Array(msgspec.Struct, array_like=True):
    a: int
    b: str


class Model(pydantic.BaseModel):
    a: int


class Alias(pydantic.BaseModel):
    a: int = Field(alias="theA")


class Camel(pydantic.BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)
    some_name: int


class ReadAlias(pydantic.BaseModel):
    a: int = Field(validation_alias="inA")


class Choices(pydantic.BaseModel):
    a: int = Field(validation_alias=AliasChoices("x", "y"))


class WrittenAlias(pydantic.BaseModel):
    a: int = Field(default=1, serialization_alias="outA")


class TwoAliases(pydantic.BaseModel):
    a: int = Field(validation_alias="inA", serialization_alias="outA")


class Secret(pydantic.BaseModel):
    word: SecretStr


class SecretInList(pydantic.BaseModel):
    words: list[SecretBytes]


class Told(pydantic.BaseModel):
    word: SecretStr

    @pydantic.field_serializer("word")
    def tell(self, word: SecretStr) -> str:
        return word.get_secret_value()


class Computed(pydantic.BaseModel):
    a: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.a


class Strict(Computed):
    model_config = ConfigDict(extra="forbid")


class Nested(pydantic.BaseModel):
    inner: Alias
    many: list[Alias]


class NestedSecret(pydantic.BaseModel):
    inner: dict[str, Secret | None]


class Standard(pydantic.BaseModel):
    at: datetime
    amount: Decimal
    id: uuid.UUID
    every: timedelta
    colour: Colour
    data: bytes


class Root(pydantic.RootModel[list[int]]):
    pass


class One(pydantic.BaseModel):
    kind: Literal["one"] = "one"
    a: int


class Two(pydantic.BaseModel):
    kind: Literal["two"] = "two"
    a: int


@pydantic.dataclasses.dataclass
class Checked:
    a: int
    b: int = 5


@pydantic.dataclasses.dataclass
class CheckedAlias:
    a: int = Field(alias="theA", default=7)


@pydantic.dataclasses.dataclass
class CheckedBytes:
    a: bytes


@dataclasses.dataclass
class WithModel:
    model: Model


_attrs: Any = importlib.import_module("attrs")
Attrs: Any = _attrs.make_class("Attrs", {"a": _attrs.field(type=int), "b": _attrs.field(type=str)})
Id = NewType("Id", int)

Case = tuple[str, Any, Any]
CASES: list[Case] = [
    ("`int`", int, 1),
    ("`int` of any size", int, 10**30),
    ("`float`", float, 1.5),
    ("`float`, NaN or infinite", float, float("nan")),
    ("`bool`", bool, True),
    ("`None`", None, None),
    ("`str`", str, "ä\n"),
    ("`bytes`", bytes, b"\x00\xff"),
    ("`bytearray`", bytearray, bytearray(b"ab")),
    ("`memoryview`", memoryview, memoryview(b"ab")),
    ("`datetime` with a time zone", datetime, datetime(2026, 1, 2, 3, 4, 5, 6, UTC)),
    ("`datetime` with an offset", datetime, datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=2)))),
    ("`datetime` without a time zone", datetime, datetime(2026, 1, 2, 3)),  # noqa: DTZ001 - that is the case
    ("`date`", date, date(2026, 1, 2)),
    ("`time`", time, time(1, 2, 3)),
    ("`timedelta`", timedelta, timedelta(days=1, microseconds=5)),
    ("`timedelta`, negative", timedelta, -timedelta(seconds=90)),
    ("`UUID`", uuid.UUID, uuid.UUID(int=7)),
    ("`Decimal`", Decimal, Decimal("1.10")),
    ("`Decimal` with an exponent", Decimal, Decimal("1E+3")),
    ("`Enum`", Colour, Colour.RED),
    ("`IntEnum`", Number, Number.ONE),
    ("`StrEnum`", Word, Word.A),
    ("`Flag`", Bits, Bits.A | Bits.B),
    ("`Literal`", Literal["a", 1], "a"),
    ("`X | None`", int | None, None),
    ("`int | str`", int | str, "a"),
    ("`Annotated[int, msgspec.Meta(...)]`", Annotated[int, msgspec.Meta(ge=0)], 3),
    ("`NewType`", Id, Id(4)),
    ("`Any`", Any, {"a": [1, None]}),
    ("`msgspec.Raw`", msgspec.Raw, msgspec.Raw(b'{"a": 1}')),
    ("`list`", list[int], [1, 2]),
    ("`tuple[int, str]`", tuple[int, str], (1, "a")),
    ("`tuple[int, ...]`", tuple[int, ...], (1, 2)),
    ("`set`", set[int], {1, 2}),
    ("`frozenset`", frozenset[str], frozenset({"a"})),
    ("`Sequence`", Sequence[int], [1]),
    ("`dict`", dict[str, int], {"a": 1}),
    ("`Mapping`", Mapping[str, int], {"a": 1}),
    ("`dict` by `int`", dict[int, str], {1: "a"}),
    ("`dict` by `UUID`", dict[uuid.UUID, int], {uuid.UUID(int=5): 1}),
    ("`dict` by `date`", dict[date, int], {date(2026, 1, 2): 1}),
    ("`dict` by `Enum`", dict[Colour, int], {Colour.RED: 1}),
    ("dataclass", Data, Data(1, "y")),
    ("dataclass, frozen, with slots", Frozen, Frozen(a=1)),
    ("`TypedDict`", Keys, Keys(a=1)),
    ("`NamedTuple`", Named, Named(1, "a")),
    ("attrs class", Attrs, Attrs(1, "a")),
    ("`msgspec.Struct`", Struct, Struct(1)),
    ("`Struct`, renamed fields", Renamed, Renamed(1)),
    ("`Struct`, tagged union", Cat | Dog, Dog(1)),
    ("`Struct`, `array_like`", Array, Array(1, "b")),
    ("pydantic model", Model, Model(a=1)),
    ("model with `alias`", Alias, Alias(theA=1)),
    ("model with `alias_generator`", Camel, Camel.model_validate({"someName": 1})),
    ("model with `validation_alias`", ReadAlias, ReadAlias.model_validate({"inA": 1})),
    ("model with `AliasChoices`", Choices, Choices.model_validate({"x": 1})),
    ("model with `serialization_alias`", WrittenAlias, WrittenAlias(a=2)),
    ("model with both, different", TwoAliases, TwoAliases.model_validate({"inA": 1})),
    ("model in a model", Nested, Nested(inner=Alias(theA=1), many=[Alias(theA=2)])),
    ("model with standard types", Standard, Standard.model_validate(
        {"at": "2026-01-02T03:04:05Z", "amount": "1.10", "id": uuid.UUID(int=1), "every": 5, "colour": "red",
         "data": b"ab"})),
    ("model with `SecretStr`", Secret, Secret(word=SecretStr("s"))),
    ("model with `list[SecretBytes]`", SecretInList, SecretInList(words=[SecretBytes(b"s")])),
    ("model with a secret in a model", NestedSecret, NestedSecret(inner={})),
    ("`SecretStr` with a `field_serializer`", Told, Told(word=SecretStr("s"))),
    ("model with `computed_field`", Computed, Computed(a=1)),
    ("`computed_field` with `extra=\"forbid\"`", Strict, Strict(a=1)),
    ("`RootModel`", Root, Root([1])),
    ("discriminated union of models", Annotated[One | Two, Field(discriminator="kind")], Two(a=1)),
    ("`list` of models", list[Alias], [Alias(theA=1)]),
    ("`dict` of models", dict[str, Alias], {"x": Alias(theA=1)}),
    ("model or `None`", Alias | None, Alias(theA=1)),
    ("pydantic dataclass", Checked, Checked(1, 6)),
    ("pydantic dataclass with `alias`", CheckedAlias, CheckedAlias(theA=1)),
    ("pydantic dataclass with `bytes`", CheckedBytes, CheckedBytes(b"ab")),
    ("`tuple` of `bytes` and a model", tuple[bytes, Model], (b"ab", Model(a=1))),
    ("dataclass with a model", WithModel, WithModel(Model(a=1))),
    ("`deque`", collections.deque[int], collections.deque([1])),
    ("`defaultdict`", collections.defaultdict[str, int], collections.defaultdict(int, {"a": 1})),
    ("`Fraction`", fractions.Fraction, fractions.Fraction(1, 2)),
    ("`Path`", pathlib.PurePosixPath, pathlib.PurePosixPath("/a")),
    ("`IPv4Address`", ipaddress.IPv4Address, ipaddress.IPv4Address("192.0.2.1")),
    ("`complex`", complex, 1j),
]  # fmt: skip


def published(value: Any) -> bytes | None:
    """The payload as it is stored; None if the value is refused."""
    try:
        return bytes(wire.json(value))
    except (TypeError, ValueError, InvalidArgument):
        return None


def outcome(kind: Any, value: Any) -> tuple[str, str]:
    """The cells of a row: what is published, and what a handler that is annotated with the type gets."""
    stored = published(value)
    shown = "refused" if stored is None else f"`{stored.decode()}`"
    try:
        decode = decoder(kind)
    except TypeError:
        return shown, "refused"
    if stored is None:
        return shown, "-"
    read = decode(stored)
    assert read == value, (kind, value, stored, read)
    assert kind is memoryview or type(read) is type(value)
    return shown, "equal"


def lines() -> Iterator[str]:
    yield "| Type | Published as | Read |"
    yield "|---|---|---|"
    for label, kind, value in CASES:
        shown, read = outcome(kind, value)
        yield f"| {label.replace('|', chr(92) + '|')} | {shown} | {read} |"


if __name__ == "__main__":
    print("\n".join(lines()))
