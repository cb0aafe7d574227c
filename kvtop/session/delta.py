"""Differences: of JSON trees, of byte columns, and of rows of requests. All pure.

Every pair here is an inverse: what `x_delta(old, new)` gives, `x_apply(old, delta)` turns
back into `new`. The apply side reads files, so it trusts nothing: data that does not fit
raises `ValueError`.
"""

from __future__ import annotations

import itertools
import statistics
import zlib
from typing import Any

from kvtop.model.codec import MAX_COLUMN_BYTES

Json = Any

_ESCAPE = 255
_LETTER = ord("@")
_LETTER_REACH = 27  # up to "[", before the backslash; down to "%", after the quote
WINDOW = 32_768
"""How far back deflate looks, bytes."""


def tree_delta(old: Json, new: Json) -> Json:
    """What changed between two JSON trees.

    Returns:
        `[value]` where a value was replaced; an object of deltas by key where an object or a
        list of the same kind changed inside. In such an object `[]` is a key that went; for
        lists the keys are indices, `-` is the new, shorter length and `+` the new tail.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        out: dict[str, Json] = {}
        for key, value in new.items():
            if key not in old:
                out[key] = [value]
            elif old[key] != value:
                out[key] = tree_delta(old[key], value)
        for key in old:
            if key not in new:
                out[key] = []
        return out
    if isinstance(old, list) and isinstance(new, list):
        changes: dict[str, Json] = {}
        for index, (was, value) in enumerate(zip(old, new, strict=False)):
            if was != value:
                changes[str(index)] = tree_delta(was, value)
        if len(new) < len(old):
            changes["-"] = len(new)
        elif len(new) > len(old):
            changes["+"] = new[len(old) :]
        return changes
    return [new]


def tree_apply(old: Json, delta: Json) -> Json:
    """The new tree. `old` is changed in place where it is an object or a list.

    Raises:
        ValueError: The delta does not belong to `old`.
    """
    if isinstance(delta, list):
        if len(delta) != 1:
            raise ValueError("a replaced value has one value")
        return delta[0]
    if not isinstance(delta, dict):
        raise ValueError("a delta is an object or a list")  # noqa: TRY004
    if isinstance(old, dict):
        for key, change in delta.items():
            if change == []:
                old.pop(key, None)
            else:
                old[key] = tree_apply(old.get(key), change)
        return old
    if isinstance(old, list):
        _list_apply(old, delta)
        return old
    raise ValueError("a change inside something that has no inside")


def _list_apply(old: list[Json], delta: dict[str, Json]) -> None:
    for key, change in delta.items():
        if key == "-":
            if not isinstance(change, int) or not 0 <= change <= len(old):
                raise ValueError("a list is cut to a length it does not have")
            del old[change:]
        elif key == "+":
            if not isinstance(change, list):
                raise ValueError("the tail of a list is a list")
            old.extend(change)
        else:
            index = int(key)
            if not 0 <= index < len(old):
                raise ValueError("a change outside a list")
            old[index] = tree_apply(old[index], change)


def xor(left: bytes, right: bytes) -> bytes:
    """The two columns, equally long, xor-ed."""
    mixed = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    return mixed.to_bytes(len(left), "little")


def deflate(data: bytes, before: bytes = b"") -> bytes:
    """Raw deflate.

    `Z_FILTERED` avoids the short accidental matches that scattered numbers are full of and
    that cost more than they save.

    Args:
        data: What to pack.
        before: Something alike that the reader has too; its last 32 KiB are the preset
            dictionary.
    """
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_FILTERED, before[-WINDOW:])
    return packer.compress(data) + packer.flush()


def inflate_raw(data: bytes, before: bytes = b"", limit: int = MAX_COLUMN_BYTES) -> bytes:
    """Undo `deflate`.

    Raises:
        ValueError: Damaged, or longer than `limit` bytes.
    """
    try:
        unpacker = zlib.decompressobj(-15, before[-WINDOW:])
        out = unpacker.decompress(data, limit + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(out) > limit or not unpacker.eof or unpacker.unused_data:
        raise ValueError("not one whole deflate stream")
    return out


def column_delta(old: bytes, new: bytes) -> tuple[bytes, bytes]:
    """What changed between two equally long byte columns.

    Returns:
        The gaps between changed places, one byte each (255 and then four bytes where a gap is
        255 or more), and the xor of old and new at each. Gaps come from -1.
    """
    mixed = xor(old, new)
    places = list(itertools.compress(range(len(mixed)), mixed))
    gaps = [b - a for a, b in zip([-1, *places], places, strict=False)]
    if gaps and max(gaps) >= _ESCAPE:
        packed = b"".join(
            bytes((gap,)) if gap < _ESCAPE else b"\xff" + gap.to_bytes(4, "big") for gap in gaps
        )
    else:
        packed = bytes(gaps)
    return packed, mixed.replace(b"\0", b"")


def column_apply(old: bytes, gaps: bytes, values: bytes) -> bytes:
    """The new column.

    Raises:
        ValueError: The delta does not belong to `old`.
    """
    sizes = _gap_sizes(gaps)
    places = list(itertools.accumulate(sizes, initial=-1))[1:]
    if len(places) != len(values) or (places and places[-1] >= len(old)) or 0 in sizes:
        raise ValueError("a change outside a column")
    out = bytearray(old)
    for place, value in zip(places, values, strict=True):
        out[place] ^= value
    return bytes(out)


def _gap_sizes(gaps: bytes) -> list[int]:
    if _ESCAPE not in gaps:
        return list(gaps)
    out = []
    at = 0
    while at < len(gaps):
        if gaps[at] != _ESCAPE:
            out.append(gaps[at])
            at += 1
            continue
        if at + 5 > len(gaps):
            raise ValueError("a gap is cut off")
        out.append(int.from_bytes(gaps[at + 1 : at + 5], "big"))
        at += 5
    return out


Table = list[list[Json]]
"""Rows of equal length; the first value of a row is its key, unique in the table."""


def rows_delta(old: Table, new: Table) -> dict[str, Json]:
    """What changed between two tables.

    Returns:
        `r`: indices of old rows that went. `a`: new rows, as columns. `o`: the order, as
        indices into what is left and then the new ones; absent when it is just that. `c`:
        by column number, what to add to each row: a list, or `[n, letters]`, where each
        letter adds n plus its distance from `@`. `s`: `[row, column, value]` for the rest.
    """
    was = {row[0]: row for row in old}
    keys = [row[0] for row in new]
    alive = set(keys)
    kept = [row[0] for row in old if row[0] in alive]
    added = [row for row in new if row[0] not in was]
    out: dict[str, Json] = {}
    gone = [index for index, row in enumerate(old) if row[0] not in alive]
    if gone:
        out["r"] = gone
    if added:
        out["a"] = [list(column) for column in zip(*added, strict=True)]
    expected = kept + [row[0] for row in added]
    if expected != keys:
        place = {key: index for index, key in enumerate(expected)}
        out["o"] = [place[key] for key in keys]
    if kept:
        _columns_delta(out, [was.get(row[0], row) for row in new], new)
    return out


def _columns_delta(out: dict[str, Json], old: Table, new: Table) -> None:
    columns: dict[str, list[Json]] = {}
    single: list[list[Json]] = []
    for number, (before, after) in enumerate(
        zip(zip(*old, strict=True), zip(*new, strict=True), strict=True)
    ):
        if before == after:
            continue
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        numeric = [i for i in changed if isinstance(before[i], int) and isinstance(after[i], int)]
        # A row in a column of letters costs about a bit, a single change about three bytes.
        if 24 * len(numeric) > len(after):
            steps = [0] * len(after)
            for i in numeric:
                steps[i] = after[i] - before[i]
            columns[str(number)] = _letters(steps)
            taken = set(numeric)
            changed = [i for i in changed if i not in taken]
        single += [[i, number, after[i]] for i in changed]
    if columns:
        out["c"] = columns
    if single:
        out["s"] = single


def _letters(steps: list[int]) -> list[Json]:
    middle = statistics.median_low(steps)
    if max(steps) - middle > _LETTER_REACH or middle - min(steps) > _LETTER_REACH:
        return list(steps)
    return [middle, "".join(chr(_LETTER + step - middle) for step in steps)]


def _from_letters(steps: list[Json]) -> list[int]:
    if len(steps) == 2 and isinstance(steps[1], str):
        return [steps[0] + ord(letter) - _LETTER for letter in steps[1]]
    return steps


def rows_apply(old: Table, delta: dict[str, Json]) -> Table:
    """The new table.

    Raises:
        ValueError: The delta does not belong to `old`.
    """
    try:
        gone = set(delta.get("r", ()))
        rows = [list(row) for index, row in enumerate(old) if index not in gone]
        rows += [list(row) for row in zip(*delta.get("a", ()), strict=True)]
        if "o" in delta:
            order = delta["o"]
            if len(order) != len(rows) or sorted(order) != list(range(len(rows))):
                raise ValueError("an order that is none")
            rows = [rows[index] for index in order]
        for number, steps in delta.get("c", {}).items():
            column = int(number)
            for row, step in zip(rows, _from_letters(steps), strict=True):
                if step:
                    row[column] += step
        for index, column, value in delta.get("s", ()):
            rows[index][column] = value
    except (TypeError, IndexError, AttributeError, KeyError) as error:
        raise ValueError(f"a change that does not fit its table: {error}") from None
    return rows
