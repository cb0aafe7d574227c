"""`Snapshot` as JSON and back, and the contract of `kvtop once --json`.

One encoder and one decoder are built for each type from its type hints and kept, so that
a field added to the model is carried without a line here. None stays null, enums travel
by value, byte columns as base64 of zlib, and a number that JSON cannot hold (NaN,
infinity) becomes null: it says nothing anyway. Keys that are not known are ignored.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
import re
import types
import typing
import zlib
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from kvtop.errors import BadDataError
from kvtop.model.snapshot import SCHEMA, Engine, Finding, Snapshot

_KEY = re.compile(r"-?[0-9]{1,19}")
MAX_COLUMN_BYTES = 64 * 1024 * 1024
"""Longest byte column that is unpacked, blocks: a hostile file must not fill the memory."""

_T = TypeVar("_T")
_Coder = Callable[[Any], Any]


def to_json(snapshot: Snapshot, findings: Iterable[Finding] = ()) -> dict[str, Any]:
    """A snapshot as JSON values, byte columns included.

    Args:
        snapshot: What to encode.
        findings: Put in as `findings` beside it; they are not part of the snapshot and
            `from_json` does not give them back.

    Returns:
        The fields of `Snapshot` by name, `schema`, and `findings` when there are any.
    """
    out: dict[str, Any] = {"schema": SCHEMA}
    out.update(encode(snapshot))
    listed = [encode(finding) for finding in findings]
    if listed:
        out["findings"] = listed
    return out


def from_json(data: object) -> Snapshot:
    """The snapshot that `to_json` encoded.

    Raises:
        BadDataError: Not a snapshot, or one of a newer kvtop.
    """
    if not isinstance(data, dict):
        raise BadDataError("this is not a kvtop snapshot: not a JSON object")
    check_schema(data.get("schema"))
    return decode(Snapshot, data)


def check_schema(schema: object) -> None:
    """Refuse what this kvtop cannot read.

    Raises:
        BadDataError: No schema version, or a newer one.
    """
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise BadDataError("this is not a kvtop snapshot: it has no schema version")
    if schema > SCHEMA:
        raise BadDataError(
            f"this was written by a newer kvtop (schema {schema}, this one reads up to {SCHEMA})",
            "upgrade kvtop",
        )


def once_json(snapshot: Snapshot, findings: Iterable[Finding] = ()) -> dict[str, Any]:
    """What `kvtop once --json` prints: a contract, without byte columns.

    Returns:
        Exactly `schema`, `time` (Unix seconds, UTC), `sources`, `gpus`, `engines`, `stacks`
        and `findings`. An engine carries every field of `model.snapshot.Engine` and
        `blocks`, the counts of its first pool; `blocks`, `counters`, `requests`, `metrics`
        and `probe` are null where they could not be read.
    """
    return {
        "schema": SCHEMA,
        "time": encode(snapshot.time_s),
        "sources": [encode(source) for source in snapshot.sources],
        "gpus": [encode(gpu) for gpu in snapshot.gpus],
        "engines": [_once_engine(engine) for engine in snapshot.engines],
        "stacks": [encode(stacks) for stacks in snapshot.stacks],
        "findings": [encode(finding) for finding in findings],
    }


def _once_engine(engine: Engine) -> dict[str, Any]:
    bare = tuple(
        dataclasses.replace(pool, states=None, refs=None, tables=None) for pool in engine.pools
    )
    out: dict[str, Any] = encode(dataclasses.replace(engine, pools=bare))
    for pool in out["pools"]:
        for column in ("states", "refs", "tables"):
            del pool[column]
    out["blocks"] = encode(engine.blocks) if engine.blocks is not None else None
    return out


def encode(value: Any) -> Any:
    """A value of the model (dataclass or plain) as JSON values."""
    kind: Any = type(value)
    return _encoder(kind)(value)


def decode(kind: type[_T], data: object) -> _T:
    """The value of type `kind` that `encode` gave `data` for.

    Raises:
        BadDataError: `data` does not fit the type; the text says which field.
    """
    key: Any = kind  # mypy does not see that a class is hashable
    try:
        return typing.cast(_T, _decoder(key)(data))
    except _MisfitError as error:
        where = ".".join(reversed(error.path)) or kind.__name__
        raise BadDataError(f"this is not a kvtop snapshot: {where} {error.why}") from None


class _MisfitError(Exception):
    """Where and why data does not fit; the path grows while it is passed up."""

    def __init__(self, why: str, *path: str) -> None:
        super().__init__(why)
        self.why = why
        self.path = list(path)


def _plain(value: Any) -> Any:
    return value


def _encode_float(value: Any) -> Any:
    if value is None or isinstance(value, int) or math.isfinite(value):
        return value
    return None


def _encode_bytes(value: bytes) -> str:
    return base64.b64encode(zlib.compress(value, 1)).decode("ascii")


@cache
def _encoder(kind: Any) -> _Coder:
    if kind is float:
        return _encode_float
    if kind is bytes:
        return _encode_bytes
    if kind in (str, int, bool, type(None)):
        return _plain
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: value.value
    if dataclasses.is_dataclass(kind):
        return _dataclass_encoder(typing.cast(type, kind))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _is_union(origin):
        return _optional_encoder(_encoder(_without_none(args)))
    if origin is tuple:
        return _list_encoder(_encoder(args[0]))
    if origin is dict:
        one = _encoder(args[1])
        return lambda value: {str(key): one(item) for key, item in value.items()}
    raise TypeError(f"the codec does not know {kind!r}")


def _optional_encoder(one: _Coder) -> _Coder:
    if one is _plain or one is _encode_float:
        return one
    return lambda value: None if value is None else one(value)


def _list_encoder(one: _Coder) -> _Coder:
    if one is _plain:
        return list
    return lambda value: [one(item) for item in value]


def _dataclass_encoder(kind: type) -> _Coder:
    hints = typing.get_type_hints(kind)
    names = [(field.name, _encoder(hints[field.name])) for field in dataclasses.fields(kind)]
    return lambda value: {name: one(getattr(value, name)) for name, one in names}


@cache
def _decoder(kind: Any) -> _Coder:
    if kind in _SCALARS:
        return _SCALARS[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_decoder(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(typing.cast(type, kind))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _is_union(origin):
        one = _decoder(_without_none(args))
        return lambda data: None if data is None else one(data)
    if origin is tuple:
        return _tuple_decoder(_decoder(args[0]))
    if origin is dict:
        return _dict_decoder(_decode_key if args[0] is int else _decode_str, _decoder(args[1]))
    raise TypeError(f"the codec does not know {kind!r}")


def _decode_str(data: Any) -> str:
    if not isinstance(data, str):
        raise _MisfitError("is not text")
    return data


def _decode_bool(data: Any) -> bool:
    if not isinstance(data, bool):
        raise _MisfitError("is not true or false")
    return data


def _decode_int(data: Any) -> int:
    if not isinstance(data, int) or isinstance(data, bool):
        raise _MisfitError("is not a whole number")
    return data


def _decode_float(data: Any) -> float:
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        raise _MisfitError("is not a number")
    try:
        value = float(data)
    except OverflowError:
        raise _MisfitError("is too large a number") from None
    if not math.isfinite(value):
        raise _MisfitError("is not a finite number")
    return value


def _decode_bytes(data: Any) -> bytes:
    if not isinstance(data, str):
        raise _MisfitError("is not a byte column")
    try:
        return inflate(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        raise _MisfitError("is not a byte column") from None


def inflate(packed: bytes, limit: int = MAX_COLUMN_BYTES) -> bytes:
    """Unpack one zlib stream.

    Args:
        packed: The whole stream.
        limit: Longest result, bytes.

    Raises:
        ValueError: Not one whole stream, or longer than `limit`.
    """
    unpacker = zlib.decompressobj()
    try:
        out = unpacker.decompress(packed, limit + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(out) > limit or not unpacker.eof or unpacker.unused_data:
        raise ValueError("not one whole zlib stream")
    return out


def _enum_decoder(kind: type[Enum]) -> _Coder:
    members = {member.value: member for member in kind}

    def one(data: Any) -> Enum:
        try:
            return members[data]
        except (KeyError, TypeError):
            raise _MisfitError("is none of the known words") from None

    return one


def _tuple_decoder(one: _Coder) -> _Coder:
    def every(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _MisfitError("is not a list")
        return tuple(one(item) for item in data)

    return every


def _decode_key(data: Any) -> int:
    """A whole number as the key of an object, which JSON writes as text."""
    if not isinstance(data, str) or not _KEY.fullmatch(data):
        raise _MisfitError("is not a whole number")
    return int(data)


def _dict_decoder(key_of: _Coder, one: _Coder) -> _Coder:
    def every(data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise _MisfitError("is not an object")
        return {key_of(key): one(item) for key, item in data.items()}

    return every


def _dataclass_decoder(kind: type) -> _Coder:
    hints = typing.get_type_hints(kind)
    fields = [
        (field.name, _decoder(hints[field.name]), _has_default(field))
        for field in dataclasses.fields(kind)
    ]

    def one(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _MisfitError("is not an object")
        values: dict[str, Any] = {}
        for name, decoder, optional in fields:
            if name in data:
                try:
                    values[name] = decoder(data[name])
                except _MisfitError as error:
                    error.path.append(name)
                    raise
            elif not optional:
                raise _MisfitError("is missing", name)
        return kind(**values)

    return one


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return (
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    )


def _is_union(origin: Any) -> bool:
    return origin is typing.Union or origin is types.UnionType


def _without_none(args: tuple[Any, ...]) -> Any:
    rest = [arg for arg in args if arg is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"the codec does not know unions of {rest!r}")
    return rest[0]


_SCALARS: dict[Any, _Coder] = {
    str: _decode_str,
    bool: _decode_bool,
    int: _decode_int,
    float: _decode_float,
    bytes: _decode_bytes,
}
