"""Typed columns of a projection: their declaration, and payloads as rows. Pure.

A type fits a JSON value or it does not; nothing is coerced or rounded. See docs/howto/projections.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal, DecimalException, DivisionByZero, Inexact, InvalidOperation, Overflow
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple, cast

import msgspec
import pyarrow

from pgmb.errors import InvalidArgument
from pgmb.lake.events import Layout

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow

_TOKEN: Final = re.compile(r"\s*([A-Za-z_]\w*|\d+|[<>(),:.])")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_ALIASES: Final = {
    "text": "string", "bool": "boolean", "integer": "int", "long": "bigint", "timestamptz": "timestamp",
    "numeric": "decimal",
}  # fmt: skip
_EVENT_FIELDS: Final = [
    pa.field("event_seq", pa.int64(), nullable=False),
    pa.field("event_id", pa.string(), nullable=False),
    pa.field("event_topic", pa.string(), nullable=False),
    pa.field("event_key", pa.string()),
    pa.field("event_published_at", pa.timestamp("us", tz="UTC"), nullable=False),
]
_RESCUE_FIELDS: Final = [pa.field("rescued", pa.string()), pa.field("rescue_reason", pa.string())]
EVENT_COLUMNS: Final = {
    "event_seq": "seq",
    "event_id": "id",
    "event_topic": "topic",
    "event_key": "key",
    "event_published_at": "published_at",
}
"""The columns that each row has of its event."""
PARTITION: Final = "event_date"
STATISTICS: Final = ("event_seq", "event_published_at")
_RESERVED: Final = {*EVENT_COLUMNS, PARTITION, *(field.name for field in _RESCUE_FIELDS)}
_KINDS: Final = {
    ord('"'): "string", ord("{"): "object", ord("["): "array", ord("t"): "boolean", ord("f"): "boolean",
    ord("n"): "null",
}  # fmt: skip
# Names of fields may be data: of those not all are remembered.
_MOST_FIELDS: Final = 1000
_LONGEST_FIELD: Final = 200
_AT_ONCE: Final = 8192
# JSON nests without limit, Python does not.
_UNREADABLE: Final = (msgspec.DecodeError, RecursionError)
_DECIMAL: Final = re.compile(rb'"?([+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"?')
_FINER_THAN_MICROSECONDS: Final = re.compile(rb"\.[0-9]{6}[0-9]*[1-9]")
_TRAPS: Final = [DivisionByZero, Inexact, InvalidOperation, Overflow]


class MisfitError(Exception):
    """A payload that does not fit, where that stops the projection."""


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """A column: its type, the field of the payload that it comes from (by default that of its name), and
    whether a payload without it fits."""

    name: str
    type: str
    path: list[str] = []
    required: bool = False

    @property
    def steps(self) -> list[str]:
        return self.path or [self.name]


# -- Declarations --------------------------------------------------------------------------------------------


def parse_columns(text: str) -> list[Column]:
    """Columns of a DDL: "order bigint not null, total decimal(10,2), city string from customer.city"."""
    tokens = _Tokens(text)
    columns: list[Column] = []
    while True:
        columns.append(_column(tokens.name(), tokens))
        if tokens.done:
            return checked(columns)
        tokens.expect(",")


class GivenColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column of a declaration in YAML. path: names with dots between them, or a list."""

    type: str
    path: str | list[str] = []
    required: bool = False


def parse_column(name: str, given: str | GivenColumn) -> Column:
    """A column of a declaration in YAML: a type as in a DDL, or one with its path."""
    tokens = _Tokens(given if isinstance(given, str) else given.type)
    column = _column(name, tokens)
    if not tokens.done:
        raise tokens.wrong("the end")
    if isinstance(given, str):
        return column
    path = given.path.split(".") if isinstance(given.path, str) else given.path
    return Column(name, column.type, path or column.path, given.required or column.required)


def checked(columns: Sequence[Column]) -> list[Column]:
    """The columns, if they can be those of one table."""
    seen: set[str] = set()
    for column in columns:
        if not _NAME.fullmatch(column.name):
            raise InvalidArgument(
                f"a column's name must be letters, digits and underscores, got {column.name!r}"
            )
        if column.name.lower() in _RESERVED:
            wrong = InvalidArgument(f"every projection has a column {column.name}")
            wrong.advise(f'Choose another name: "other_name {column.type} from {column.name}".')
            raise wrong
        if column.name.lower() in seen:
            raise InvalidArgument(f"column {column.name} is declared twice")
        seen.add(column.name.lower())
    if not columns:
        raise InvalidArgument("a projection must have at least one column")
    return list(columns)


def _column(name: str, tokens: _Tokens) -> Column:
    kind = _type(tokens)
    required, path = False, list[str]()
    while word := tokens.take("not", "from"):
        if word == "not":
            tokens.expect("null")
            required = True
        else:
            path = [tokens.name()]
            while tokens.take("."):
                path.append(tokens.name())
    return Column(name, kind.text, [] if path == [name] else path, required)


class _Tokens:
    """A declaration as words and signs."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0
        self._found: list[str] = []
        while self._place < len(text.rstrip()):
            found = _TOKEN.match(text, self._place)
            if found is None:
                raise self.wrong("a name, a type or a sign")
            self._found.append(found[1])
            self._place = found.end()
        self._found.reverse()

    @property
    def done(self) -> bool:
        return not self._found

    def take(self, *wanted: str) -> str | None:
        if self._found and self._found[-1].lower() in wanted:
            return self._found.pop().lower()
        return None

    def expect(self, wanted: str) -> None:
        if self.take(wanted) is None:
            raise self.wrong(repr(wanted))

    def name(self) -> str:
        if not self._found or not _NAME.fullmatch(self._found[-1]):
            raise self.wrong("a name")
        return self._found.pop()

    def number(self) -> int:
        if not self._found or not self._found[-1].isdecimal():
            raise self.wrong("a number")
        return int(self._found.pop())

    def wrong(self, wanted: str) -> InvalidArgument:
        rest = " ".join(reversed(self._found[-5:])) or self._text[self._place :].strip()[:40]
        error = InvalidArgument(f"expected {wanted} in {self._text!r}, got {rest or 'its end'!r}")
        error.advise(
            'Write columns as "order bigint not null, total decimal(10,2), city string from a.city".'
        )
        return error


# -- Types ---------------------------------------------------------------------------------------------------


class Type(NamedTuple):
    """A column's type: its text, that of Arrow, that which msgspec decodes, and what of JSON it may be.

    convert   makes of a decoded value one for Arrow, or raises ValueError; None: it is one
    """

    text: str
    arrow: Any
    decoded: Any
    kinds: frozenset[str]
    convert: Callable[[Any], Any] | None = None


def type_of(text: str) -> Type:
    """The type that a text names."""
    tokens = _Tokens(text)
    found = _type(tokens)
    if not tokens.done:
        raise tokens.wrong("the end of a type")
    return found


def _scalar(text: str, arrow: Any, decoded: Any, *kinds: str) -> Type:
    return Type(text, arrow, decoded, frozenset(kinds))


def _whole(bits: int) -> Any:
    return Annotated[int, msgspec.Meta(ge=-(1 << bits - 1), le=(1 << bits - 1) - 1)]


def _json_text(raw: msgspec.Raw) -> str | None:
    text = bytes(raw)
    return None if text == b"null" else text.decode()


_moment: Final[Callable[[bytes], datetime]] = msgspec.json.Decoder(
    Annotated[datetime, msgspec.Meta(tz=True)]
).decode


def _timestamp(raw: msgspec.Raw) -> datetime | None:
    text = bytes(raw)
    if text == b"null":
        return None
    # Of a number the years would be guessed.
    if text[0] != ord('"'):
        raise ValueError("Expected `timestamp`, got no string")
    if _FINER_THAN_MICROSECONDS.search(text):
        raise ValueError("Expected `timestamp`, got parts of microseconds")
    value: datetime = _moment(text)
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("Expected `timestamp` of the years 1 to 9999 in UTC") from None


_SCALARS: Final = {
    "string": _scalar("string", pa.string(), str, "string"),
    "boolean": _scalar("boolean", pa.bool_(), bool, "boolean"),
    "int": _scalar("int", pa.int32(), _whole(32), "number"),
    "bigint": _scalar("bigint", pa.int64(), _whole(64), "number"),
    "double": _scalar("double", pa.float64(), float, "number"),
    "timestamp": Type(
        "timestamp", pa.timestamp("us", tz="UTC"), msgspec.Raw, frozenset(("string",)), _timestamp
    ),
    "date": _scalar("date", pa.date32(), date, "string"),
    "json": Type(
        "json",
        pa.string(),
        msgspec.Raw,
        frozenset(("string", "boolean", "number", "object", "array")),
        _json_text,
    ),
}


def _type(tokens: _Tokens) -> Type:
    word = tokens.name().lower()
    name = _ALIASES.get(word, word)
    match name:
        case "decimal":
            return _decimal(tokens)
        case "array":
            tokens.expect("<")
            inner = _type(tokens)
            tokens.expect(">")
            return Type(
                f"array<{inner.text}>",
                pa.list_(inner.arrow),
                list[_optional(inner)],  # type: ignore[misc]
                frozenset(("array",)),
                _each(inner),
            )
        case "map":
            tokens.expect("<")
            tokens.expect("string")
            tokens.expect(",")
            inner = _type(tokens)
            tokens.expect(">")
            convert = _each(inner)

            def pairs(found: dict[str, Any]) -> list[tuple[str, Any]]:
                return list(zip(found, convert(found.values()) if convert else found.values(), strict=True))

            return Type(
                f"map<string, {inner.text}>",
                pa.map_(pa.string(), inner.arrow),
                dict[str, _optional(inner)],  # type: ignore[misc]
                frozenset(("object",)),
                pairs,
            )
        case "struct":
            return _struct(tokens)
        case _ if name in _SCALARS:
            return _SCALARS[name]
        case _:
            unknown = InvalidArgument(f"there is no type {word}")
            unknown.advise(
                f"Types are {', '.join(_SCALARS)}, decimal(precision, scale), array<…>, map<string, …>"
                " and struct<name: …>."
            )
            raise unknown


def _decimal(tokens: _Tokens) -> Type:
    tokens.expect("(")
    precision, scale = tokens.number(), 0
    if tokens.take(","):
        scale = tokens.number()
    tokens.expect(")")
    if not 1 <= precision <= 38 or scale > precision:
        raise InvalidArgument(
            f"a decimal must have a precision of 1 to 38 and a scale up to that, got {precision}, {scale}"
        )
    unit = Decimal(1).scaleb(-scale)
    exact = Context(prec=precision, traps=_TRAPS)

    def convert(raw: msgspec.Raw) -> Decimal | None:
        text = bytes(raw)
        if text == b"null":
            return None
        # Python's Decimal takes more spellings: underscores, spaces, digits of other scripts, NaN.
        number = _DECIMAL.fullmatch(text)
        if number is None or (text[0] == ord('"')) != (text[-1] == ord('"')):
            raise ValueError(f"Expected `decimal({precision},{scale})`, got no number")
        try:
            return Decimal(number[1].decode()).quantize(unit, context=exact)
        except DecimalException:
            raise ValueError(f"Expected `decimal({precision},{scale})`, got more digits") from None

    return Type(
        f"decimal({precision},{scale})",
        pa.decimal128(precision, scale),
        msgspec.Raw,
        frozenset(("number", "string")),
        convert,
    )


def _struct(tokens: _Tokens) -> Type:
    tokens.expect("<")
    fields: list[tuple[str, Type]] = []
    while True:
        name = tokens.name()
        tokens.take(":")
        fields.append((name, _type(tokens)))
        if tokens.take(">"):
            break
        tokens.expect(",")
    made = msgspec.defstruct(
        "Struct",
        [
            (f"c{n}", _optional(inner), msgspec.field(default=None, name=name))
            for n, (name, inner) in enumerate(fields)
        ],
    )

    def convert(found: Any) -> dict[str, Any]:
        return {name: _converted(inner, getattr(found, f"c{n}")) for n, (name, inner) in enumerate(fields)}

    return Type(
        f"struct<{', '.join(f'{name}: {inner.text}' for name, inner in fields)}>",
        pa.struct([pa.field(name, inner.arrow) for name, inner in fields]),
        made,
        frozenset(("object",)),
        convert,
    )


def _optional(inner: Type) -> Any:
    # Raw takes null too.
    return inner.decoded if inner.decoded is msgspec.Raw else inner.decoded | None


def _converted(inner: Type, value: Any) -> Any:
    return value if value is None or inner.convert is None else inner.convert(value)


def _each(inner: Type) -> Callable[[Iterable[Any]], list[Any]] | None:
    if inner.convert is None:
        return None
    return lambda values: [_converted(inner, value) for value in values]


# -- Rows ----------------------------------------------------------------------------------------------------


def layout(columns: Sequence[Column]) -> Layout:
    """How the files of a projection are written. Bounds of values are in the files, not in the table's log,
    which an erasure does not reach."""
    typed = [pa.field(column.name, type_of(column.type).arrow) for column in columns]
    schema = pa.schema([*_EVENT_FIELDS, *typed, *_RESCUE_FIELDS])
    writing = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True}
    return Layout(schema, writing, STATISTICS, "event_published_at", PARTITION)


class Seen(msgspec.Struct):
    """From which event to which a field had a JSON type. Times are in microseconds since 1970."""

    first_seq: int
    last_seq: int
    first_at: int
    last_at: int

    def join(self, other: Seen) -> None:
        self.first_seq, self.last_seq = (
            min(self.first_seq, other.first_seq),
            max(self.last_seq, other.last_seq),
        )
        self.first_at, self.last_at = min(self.first_at, other.first_at), max(self.last_at, other.last_at)


class Decoder:
    """Payloads of events as typed rows. Counts what did not fit, and the fields that payloads had."""

    def __init__(self, columns: Sequence[Column], bad: str) -> None:
        self._columns, self._bad = list(columns), bad
        self._types = [type_of(column.type) for column in columns]
        self._schema = layout(columns).schema
        tree: dict[str, Any] = {}
        self._paths = [
            _plant(tree, column.steps, kind, column)
            for column, kind in zip(columns, self._types, strict=True)
        ]
        self._whole = msgspec.json.Decoder(_shape(tree)).decode
        self._single = [
            msgspec.json.Decoder(kind.decoded if column.required else _optional(kind)).decode
            for column, kind in zip(columns, self._types, strict=True)
        ]
        self._fields: Callable[[str], dict[str, msgspec.Raw]] = msgspec.json.Decoder(
            dict[str, msgspec.Raw]
        ).decode
        self.rescued = self.dropped = 0
        self.seen: dict[tuple[str, str], Seen] = {}

    def rows(self, events: Any) -> Any:
        """The events as rows of a file; those that do not fit and are to be dropped are left out."""
        payloads: list[str] = events.column("payload").to_pylist()
        values, reasons = self._columns_of(payloads)
        self._observe(events, payloads)
        if reasons:
            if self._bad == "fail":
                place = min(reasons)
                raise MisfitError(f"event {events.column('seq')[place].as_py()}: {reasons[place]}")
            if self._bad == "drop":
                self.dropped += len(reasons)
            else:
                self.rescued += len(reasons)
        rows = pa.RecordBatch.from_arrays(
            [
                *(events.column(name) for name in EVENT_COLUMNS.values()),
                *(pa.array(column, kind.arrow) for column, kind in zip(values, self._types, strict=True)),
                pa.array([payloads[n] if n in reasons else None for n in range(len(payloads))], pa.string()),
                pa.array([reasons.get(n) for n in range(len(payloads))], pa.string()),
            ],
            schema=self._schema,
        )
        if reasons and self._bad == "drop":
            return rows.filter(pa.array([n not in reasons for n in range(len(payloads))]))
        return rows

    def _columns_of(self, payloads: Sequence[str]) -> tuple[list[list[Any]], dict[int, str]]:
        """The values of each column, and by their numbers why payloads do not fit."""
        wholes: list[Any] = []
        bad: set[int] = set()
        for number, payload in enumerate(payloads):
            try:
                wholes.append(self._whole(payload))
            except _UNREADABLE:
                bad.add(number)
                wholes.append(None)
        columns: list[list[Any]] = []
        for path, kind, column in zip(self._paths, self._types, self._columns, strict=True):
            values = wholes
            for step in path:
                get = attrgetter(step)
                values = [None if value is None else get(value) for value in values]
            if kind.convert is not None or column.required:
                for number, value in enumerate(values):
                    try:
                        values[number] = _converted(kind, value)
                        if values[number] is None and column.required:
                            bad.add(number)
                    except ValueError:
                        bad.add(number)
            columns.append(values)
        reasons: dict[int, str] = {}
        for number in sorted(bad):
            salvaged, reason = self._salvaged(payloads[number])
            for values, value in zip(columns, salvaged, strict=True):
                values[number] = value
            # A field that is there twice: the last one counts.
            if reason:
                reasons[number] = reason
        return columns, reasons

    def _salvaged(self, payload: str) -> tuple[list[Any], str]:
        """The values that fit, each for itself, and why the others do not."""
        try:
            self._fields(payload)
        except RecursionError:
            return [None] * len(self._columns), "payload: nested too deeply"
        except msgspec.DecodeError as error:
            return [None] * len(self._columns), f"payload: {error}"
        values: list[Any] = []
        reasons: list[str] = []
        for column, kind, decode in zip(self._columns, self._types, self._single, strict=True):
            value = None
            try:
                raw = self._at(payload, column.steps)
                if raw is not None:
                    value = _converted(kind, decode(raw))
                if value is None and column.required:
                    raise ValueError("Expected a value, got none")
            except ValueError as error:
                value = None
                reasons.append(f"{column.name}: {error}")
            values.append(value)
        return values, "; ".join(reasons)

    def _at(self, payload: Any, steps: Sequence[str]) -> Any:
        """The text of a field; None if it, or one on the way to it, is missing or null."""
        for number, step in enumerate(steps):
            if number and bytes(payload) == b"null":
                return None
            payload = self._fields(payload).get(step)
            if payload is None:
                return None
        return payload

    def _observe(self, events: Any, payloads: Sequence[str]) -> None:
        """Remember from which event to which a field had a JSON type, which its first sign tells."""
        first: dict[tuple[str, int], int] = {}
        last: dict[tuple[str, int], int] = {}
        for number, payload in enumerate(payloads):
            try:
                fields = self._fields(payload)
            except _UNREADABLE:
                continue
            for name, raw in fields.items():
                last[name, memoryview(raw)[0]] = number
                if len(last) > len(first):
                    first[name, memoryview(raw)[0]] = number
        seqs, times = events.column("seq"), events.column("published_at").cast(pa.int64())
        for (field, sign), begin in first.items():
            end = last[field, sign]
            seen = Seen(seqs[begin].as_py(), seqs[end].as_py(), times[begin].as_py(), times[end].as_py())
            named = (field[:_LONGEST_FIELD], _KINDS.get(sign, "number"))
            if named in self.seen:
                self.seen[named].join(seen)
            elif len(self.seen) < _MOST_FIELDS:
                self.seen[named] = seen


def _plant(tree: dict[str, Any], steps: Sequence[str], kind: Type, column: Column) -> list[str]:
    """Add a column to the tree of fields. Returns the names that lead to it in the decoded structs."""
    for step in steps[:-1]:
        inside: Any = tree.setdefault(step, {})
        if not isinstance(inside, dict):
            raise InvalidArgument(f"column {column.name} is inside of a field that another column has")
        tree = cast("dict[str, Any]", inside)
    if steps[-1] in tree:
        raise InvalidArgument(f"column {column.name} has the field of another column")
    tree[steps[-1]] = (kind, column.required and len(steps) == 1)
    return [_attribute(step) for step in steps]


def _shape(tree: Mapping[str, Any]) -> Any:
    """The struct of a tree of fields."""
    fields: list[Any] = []
    for name, inside in tree.items():
        if isinstance(inside, dict):
            made = _shape(cast("dict[str, Any]", inside)) | None
            fields.append((_attribute(name), made, msgspec.field(default=None, name=name)))
        else:
            kind, required = inside
            fields.append(
                (_attribute(name), kind.decoded, msgspec.field(name=name))
                if required
                else (_attribute(name), _optional(kind), msgspec.field(default=None, name=name))
            )
    return msgspec.defstruct("Payload", fields, kw_only=True)


def _attribute(field: str) -> str:
    """A name for any field."""
    return "f" + field.encode().hex()


def slices(events: Any) -> Iterator[Any]:
    """Batches that are small enough to become Python objects."""
    for begin in range(0, events.num_rows, _AT_ONCE):
        yield events.slice(begin, _AT_ONCE)


# -- Drift ---------------------------------------------------------------------------------------------------


class Drift(msgspec.Struct, frozen=True):
    """How payloads differ from a declaration. change: appeared, vanished or changed type."""

    field: str
    change: str
    detail: str
    since: datetime


class SeenField(NamedTuple):
    """A field, a JSON type that it had, and when."""

    field: str
    kind: str
    first_seq: int
    last_seq: int
    first_at: datetime
    last_at: datetime


def drift(columns: Sequence[Column], fields: Sequence[SeenField], segment_bits: int) -> list[Drift]:
    """Fields that are not declared, that have other types, and that no event of the last segment had."""
    expected: dict[str, frozenset[str]] = {}
    for column in columns:
        kinds = frozenset(("object",)) if len(column.steps) > 1 else type_of(column.type).kinds
        expected[column.steps[0]] = expected.get(column.steps[0], frozenset()) | kinds
    required = {column.steps[0] for column in columns if column.required}
    found: list[Drift] = []
    newest = max((one.last_seq for one in fields), default=0) >> segment_bits
    for one in fields:
        if one.field not in expected:
            found.append(Drift(one.field, "appeared", one.kind, one.first_at))
        elif one.kind not in expected[one.field] and (one.kind != "null" or one.field in required):
            wanted = " or ".join(sorted(expected[one.field]))
            found.append(Drift(one.field, "changed type", f"{one.kind} instead of {wanted}", one.first_at))
    for name in expected:
        times = [one for one in fields if one.field == name]
        if times and max(one.last_seq for one in times) >> segment_bits < newest:
            last = max(times, key=lambda one: one.last_seq)
            found.append(Drift(name, "vanished", "not in the newest segment", last.last_at))
    return sorted(found, key=lambda one: (one.field, one.change, one.detail))
