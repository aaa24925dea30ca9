"""Columns of any Spark type as JSON text, one column at a time. Values equal those of Spark's `to_json`.

Exceptions, where `to_json` loses something: timestamps keep their microseconds and are in UTC, and map keys
are encoded as values are. NULL fields are left out of objects; NULL in arrays and maps is null.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from json.encoder import encode_basestring
from typing import Any, Final, TypeAlias

import pyarrow
import pyarrow.compute
from pyspark.sql import types as t
from pyspark.sql.types import DayTimeIntervalType
from pyspark.sql.variant_utils import VariantUtils

_INTERVAL_UNITS: Final = ("DAY", "HOUR", "MINUTE", "SECOND")
_UNIT_MICROSECONDS: Final = (86_400_000_000, 3_600_000_000, 60_000_000)


def day_time(kind: DayTimeIntervalType) -> Callable[[timedelta], str]:
    """What turns values of this type into quoted literals: "INTERVAL '1 02:03:04.5' DAY TO SECOND"."""
    first, last = int(kind.startField or 0), int(kind.endField or 0)
    units = (
        _INTERVAL_UNITS[first] if first == last else f"{_INTERVAL_UNITS[first]} TO {_INTERVAL_UNITS[last]}"
    )

    def encode(value: timedelta) -> str:
        rest = value // timedelta(microseconds=1)
        sign, rest = ("-", -rest) if rest < 0 else ("", rest)
        text = ""
        for field in range(first, min(last, 2) + 1):
            number, rest = divmod(rest, _UNIT_MICROSECONDS[field])
            text += "" if field == first else " " if field == 1 else ":"
            text += f"{number}" if field == 0 else f"{number:02}"
        if last == 3:
            seconds, fraction = divmod(rest, 1_000_000)
            text += f"{seconds:02}" if first == 3 else f":{seconds:02}"
            text += f".{fraction:06}".rstrip("0") if fraction else ""
        return f"\"INTERVAL '{sign}{text}' {units}\""

    return encode


# Their stubs know too little of what arrays may be.
pa: Any = pyarrow
pc: Any = pyarrow.compute

Encoder: TypeAlias = Callable[[Any], Any]
"""From an Arrow array of values to one of JSON texts, NULL for NULL."""

_PLAIN = (t.BooleanType, t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.DecimalType)
_DAYS = 2_932_896
_MICROSECONDS = (_DAYS + 1) * 86_400_000_000 - 1


def encoder(kind: t.DataType) -> Encoder:
    """The encoder of a type. Raises TypeError for one that has no form in JSON."""
    if isinstance(kind, t.UserDefinedType):
        return encoder(kind.sqlType())
    if isinstance(kind, t.StructType):
        fields = [(encode_basestring(field.name) + ":", encoder(field.dataType)) for field in kind.fields]
        return partial(_struct, fields)
    if isinstance(kind, t.ArrayType):
        return partial(_array, encoder(kind.elementType))
    if isinstance(kind, t.MapType):
        return partial(_map, _key(kind.keyType), encoder(kind.valueType))
    if isinstance(kind, t.DayTimeIntervalType):
        return partial(_each, day_time(kind))
    for types, simple in _SIMPLE:
        if isinstance(kind, types):
            return simple
    raise TypeError(
        f"columns of type {kind.simpleString()} do not reach Python: make a string of it, as to_json does"
    )


def _key(kind: t.DataType) -> Encoder:
    """Of the keys of maps: what is no string becomes one."""
    encode = encoder(kind)
    if isinstance(kind, (*_PLAIN, t.FloatType, t.DoubleType)):
        return lambda array: _joined('"', pc.utf8_trim(encode(array), '"'), '"')
    if isinstance(kind, (t.StructType, t.ArrayType, t.MapType, t.VariantType)):
        return lambda array: _text(encode(array))
    return encode


def _plain(array: Any) -> Any:
    return array.cast(pa.string())


def _text(array: Any) -> Any:
    array = array.cast(pa.string())
    special = pc.match_substring_regex(array, r'["\\\x00-\x1f]')
    if pc.any(special).as_py():
        special = pc.fill_null(special, False)
        escaped = [encode_basestring(text)[1:-1] for text in array.filter(special).to_pylist()]
        array = pc.replace_with_mask(array, special, pa.array(escaped, pa.string()))
    return _joined('"', array, '"')


def _number(array: Any) -> Any:
    """NaN and the infinities are strings. A whole number keeps a fraction: it is a float."""
    text = array.cast(pa.string())
    whole = pc.match_substring_regex(text, "^-?[0-9]+$")
    if pc.any(whole).as_py():
        text = pc.if_else(whole, _joined(text, ".0"), text)
    finite = pc.is_finite(array)
    if pc.all(finite).as_py() is not False:
        return text
    infinite = pc.if_else(pc.greater(array, 0), '"Infinity"', '"-Infinity"')
    return pc.if_else(finite, text, pc.if_else(pc.is_nan(array), '"NaN"', infinite))


def _date(array: Any) -> Any:
    return _joined('"', _signed(array.cast(pa.string()), array.cast(pa.int32()), _DAYS), '"')


def _time(array: Any) -> Any:
    text = array.cast(pa.time64("us")).cast(pa.string())
    for zeros, short in ((r"\.0+$", ""), (r"(\.[0-9]*[1-9])0+$", r"\1")):
        text = pc.replace_substring_regex(text, zeros, short)
    return _joined('"', text, '"')


def _signed(text: Any, number: Any, last: int) -> Any:
    """Years of more than four digits have a sign."""
    if (pc.max(number).as_py() or 0) <= last:
        return text
    return pc.replace_substring_regex(text, r"^([0-9]{5,})-", r"+\1-")


def _timestamp(array: Any) -> Any:
    """ISO 8601 to the millisecond, as Spark writes it, or to the microsecond where there is more."""
    zone = None if array.type.tz is None else "UTC"
    array = array.cast(pa.timestamp("us", zone))
    short = array.cast(pa.timestamp("ms", zone), safe=False)
    text = short.cast(pa.string())
    exact = pc.equal(short.cast(pa.timestamp("us", zone)), array)
    if pc.all(exact).as_py() is False:
        text = pc.if_else(exact, text, array.cast(pa.string()))
    text = _signed(text, array.cast(pa.int64()), _MICROSECONDS)
    return _joined('"', pc.replace_substring(text, " ", "T", max_replacements=1), '"')


def _binary(array: Any) -> Any:
    return _each(lambda value: f'"{b2a_base64(value, newline=False).decode()}"', array)


def _each(encode: Callable[[Any], str], array: Any) -> Any:
    return pa.array([None if value is None else encode(value) for value in array.to_pylist()], pa.string())


def _variant(array: Any) -> Any:
    return _each(lambda value: VariantUtils.to_json(value["value"], value["metadata"]), array)


def _null(array: Any) -> Any:
    return pa.nulls(len(array), pa.string())


def _struct(fields: list[tuple[str, Encoder]], array: Any) -> Any:
    parts = [
        pc.fill_null(_joined(",", name, encode(values)), "")
        for (name, encode), values in zip(fields, array.flatten(), strict=True)
    ]
    # The comma before the first goes afterwards. To join without NULLs, Arrow also leaves out whole rows.
    whole = _joined("{", *parts, "}") if parts else pa.repeat("{}", len(array))
    whole = pc.replace_substring(whole, "{,", "{", max_replacements=1)
    return pc.if_else(array.is_valid(), whole, pa.scalar(None, pa.string())) if array.null_count else whole


def _array(element: Encoder, array: Any) -> Any:
    return _joined("[", _elements(array, element(array.values)), "]")


def _map(key: Encoder, value: Encoder, array: Any) -> Any:
    entries = _joined(key(array.keys), ":", pc.fill_null(value(array.items), "null"))
    return _joined("{", _elements(array, entries), "}")


def _elements(array: Any, texts: Any) -> Any:
    """The texts of each list's elements with commas between; NULL for a list that is NULL."""
    lists = pa.ListArray.from_arrays(array.offsets, pc.fill_null(texts, "null"))
    return pc.if_else(array.is_valid(), pc.binary_join(lists, ","), pa.scalar(None, pa.string()))


def _joined(*parts: Any) -> Any:
    return pc.binary_join_element_wise(*parts, "")


_SIMPLE: list[tuple[Any, Encoder]] = [
    (t.StringType, _text),
    (_PLAIN, _plain),
    ((t.FloatType, t.DoubleType), _number),
    (t.DateType, _date),
    (t.TimeType, _time),
    ((t.TimestampType, t.TimestampNTZType), _timestamp),
    (t.BinaryType, _binary),
    (t.VariantType, _variant),
    (t.NullType, _null),
]
