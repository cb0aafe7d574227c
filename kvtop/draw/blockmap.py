"""The block map: every block of a pool as a dot of its state's colour.

One character cell is two half cells, the upper and the lower one; they are filled
line by line with blocks in the order of their ids. While the blocks fit, a half cell
is one block. Otherwise it stands for k consecutive blocks and shows the state that most
of them have, but GHOST and then HELD win over any number of others: a single lost
block among thousands must be seen. Of equal numbers the state that holds more wins
(shared, used, cached, free); null blocks show only where there is nothing else.

Without colours (`ascii`) a cell is a letter of `model.blocks.LETTERS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvtop.draw.style import FOUND_LETTER, LIT_LETTER, NO_LETTER, state_style
from kvtop.draw.text import blank, fit
from kvtop.draw.view import Line, Run
from kvtop.model.blocks import LETTERS, BlockCounts, BlockState

# Plain ints: `bytes.count` is slower with an enum member.
_ORDER = tuple(
    int(state) for state in (BlockState.SHARED, BlockState.USED, BlockState.CACHED, BlockState.FREE)
)
_GHOST = bytes([BlockState.GHOST])
_HELD = bytes([BlockState.HELD])
_LOUD = (int(BlockState.GHOST), int(BlockState.HELD))
_UNKNOWN_LETTER = "?"
_TO_LETTERS = bytes(
    ord(LETTERS[BlockState(code)]) if code in set(BlockState) else ord(_UNKNOWN_LETTER)
    for code in range(256)
)

# A pair of half cells as one byte: upper x 16 + lower, so that runs of equal pairs
# can be found by a regular expression and not by a loop over cells.
_PAIR_LETTERS = (
    "".join(LETTERS[state] for state in BlockState) + LIT_LETTER + NO_LETTER + FOUND_LETTER + "?"
)
_LIT = _PAIR_LETTERS.index(LIT_LETTER)
_NONE = _PAIR_LETTERS.index(NO_LETTER)
_FOUND = _PAIR_LETTERS.index(FOUND_LETTER)
_TO_CODES = bytes(
    code if code < len(BlockState) else _PAIR_LETTERS.index("?") for code in range(256)
)
_SHIFTED = bytes((code * 16) % 256 for code in range(256))
_RUNS = re.compile(rb"(.)\1*", re.DOTALL)
_PAIR_STYLES = {
    upper * 16 + lower: f"map:{_PAIR_LETTERS[upper]}{_PAIR_LETTERS[lower]}"
    for upper in range(len(_PAIR_LETTERS))
    for lower in range(len(_PAIR_LETTERS))
}
_EMPTY_PAIR = _NONE * 16 + _NONE
_LIT_BIT = 0x80
# A letter of a block in a finding: a control code in its place, since those are no letters.
_FOUND_CODES = {ord(letter): code for code, letter in enumerate(LETTERS.values())}
_FOUND_LETTERS = {code: letter for letter, code in _FOUND_CODES.items()}
_LETTER_STYLES = {ord(letter): state_style(state) for state, letter in LETTERS.items()}


def blocks_a_cell(blocks: int, width: int, height: int, ascii: bool = False) -> int:  # noqa: A002
    """How many consecutive blocks one half cell (ASCII: one cell) stands for."""
    cells = width * height * (1 if ascii else 2)
    return max(1, -(-blocks // cells)) if cells > 0 else max(1, blocks)


def block_map(
    states: bytes,
    width: int,
    height: int,
    lit: Iterable[int] = (),
    ascii: bool = False,  # noqa: A002 - the name of the option
    *,
    found: Iterable[int] = (),
) -> list[Line]:
    """The map of a pool.

    Args:
        states: One `BlockState` byte a block.
        width: Cells a line.
        height: Lines.
        lit: Blocks to light up; ids outside the pool are ignored.
        ascii: One letter a cell instead of two coloured halves.
        found: Blocks that findings are about; a cell that is lit or shows a ghost or held
            block keeps that colour.

    Returns:
        Exactly `height` lines of `width` cells. A pool smaller than the map fills the
        first lines only.
    """
    if width <= 0 or height <= 0 or not states:
        return blank(width, height)
    each = blocks_a_cell(len(states), width, height, ascii)
    cells = states if each == 1 else _summed(states, each)
    marked = {block // each for block in lit if 0 <= block < len(states)}
    about = {block // each for block in found if 0 <= block < len(states)}
    about = {cell for cell in about if cells[cell] not in _LOUD}
    if ascii:
        return _letters(cells, width, height, marked, about)
    codes = bytearray(cells.translate(_TO_CODES))
    for cell in about:
        codes[cell] = _FOUND
    for cell in marked:
        codes[cell] = _LIT
    codes.extend(bytes([_NONE]) * (width * height * 2 - len(codes)))
    out: list[Line] = []
    for start in range(0, len(codes), 2 * width):
        upper = int.from_bytes(codes[start : start + width].translate(_SHIFTED), "big")
        lower = int.from_bytes(codes[start + width : start + 2 * width], "big")
        pairs = (upper + lower).to_bytes(width, "big")
        runs: list[Run] = []
        for match in _RUNS.finditer(pairs):
            pair = pairs[match.start()]
            cell_count = match.end() - match.start()
            if pair == _EMPTY_PAIR:
                runs.append((" " * cell_count, ""))
            else:
                runs.append(("▀" * cell_count, _PAIR_STYLES[pair]))
        out.append(tuple(runs))
    return out


def _letters(
    cells: bytes, width: int, height: int, marked: set[int], about: set[int]
) -> list[Line]:
    letters = bytearray(cells.translate(_TO_LETTERS))
    for cell in about - marked:
        letters[cell] = _FOUND_CODES.get(letters[cell], letters[cell])
    for cell in marked:
        letters[cell] |= _LIT_BIT
    out: list[Line] = []
    for row in range(height):
        runs: list[Run] = []
        for match in _RUNS.finditer(letters, row * width, (row + 1) * width):
            byte = letters[match.start()]
            # The letter stays on a lit cell, so its state can still be read.
            letter = _FOUND_LETTERS.get(byte, byte & ~_LIT_BIT)
            style = "map.lit" if byte & _LIT_BIT else _LETTER_STYLES.get(letter, "")
            if byte in _FOUND_LETTERS:
                style = "map.found"
            runs.append((chr(letter) * (match.end() - match.start()), style))
        out.append(fit(runs, width))
    return out


def _summed(states: bytes, each: int) -> bytes:
    """One state byte for each `each` consecutive blocks, by the rule of this module."""
    seen: dict[bytes, int] = {}
    out = bytearray()
    for start in range(0, len(states), each):
        chunk = states[start : start + each]
        state = seen.get(chunk)
        if state is None:
            state = seen[chunk] = _telling(chunk)
        out.append(state)
    return bytes(out)


def _telling(chunk: bytes) -> int:
    first = chunk[0]
    if chunk.count(first) == len(chunk):
        return first
    if _GHOST in chunk:
        return BlockState.GHOST
    if _HELD in chunk:
        return BlockState.HELD
    return max(_ORDER, key=chunk.count)


def state_bar(
    counts: BlockCounts,
    width: int,
    ascii: bool = False,  # noqa: A002 - the name of the option
) -> Line:
    """One line that divides `width` cells by the counts, for pools without a block column.

    A state that has blocks gets at least one cell.
    """
    order = (
        (BlockState.GHOST, counts.ghost),
        (BlockState.HELD, counts.held),
        (BlockState.SHARED, counts.shared),
        (BlockState.USED, counts.used),
        (BlockState.CACHED, counts.cached),
        (BlockState.FREE, counts.free),
    )
    total = sum(max(blocks, 0) for _, blocks in order)
    if total == 0:
        return fit((), width)
    runs: list[Run] = []
    seen = 0
    left = width
    for state, blocks in order:
        if blocks <= 0:
            continue
        before, seen = seen, seen + blocks
        cells = max(1, width * seen // total - width * before // total)
        cells = min(cells, left)
        left -= cells
        letter = LETTERS[state] if ascii else "█"
        runs.append((letter * cells, state_style(state)))
    return fit(runs, width)
