"""Addresses of functions in a running process, read from its own memory.

The ELF images are read as they are mapped, not from their files: those may be in
another mount namespace, or replaced by an upgrade since the process started. Layout:
elf(5); the hash table is DT_GNU_HASH, which every linker of the last 15 years writes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtop.attach.ability import NO_PTRACE, AttachError
from kvtop.attach.procfs import Proc
from kvtop.errors import ExitCode

Read = Callable[[int, int], bytes]
"""Memory of a process: (address, length) -> bytes. Raises OSError where nothing is mapped."""

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 5, 6, 0x6FFFFEF5
_MAX_NAME = 256
_MAX_CHAIN = 4096
_PAGE = 4096


class ElfError(Exception):
    """A mapped image is not what kvtop can read."""


@dataclass(frozen=True, slots=True)
class Image:
    """One mapped file."""

    base: int
    """Address of its first byte."""
    path: str
    """As the kernel names it, in the mount namespace of the process."""

    @property
    def name(self) -> str:
        """File name."""
        return self.path.removesuffix(" (deleted)").rpartition("/")[2]


def parse_maps(text: str) -> list[Image]:
    """Mapped files of /proc/PID/maps, each once, at the address of its first byte."""
    found: dict[str, Image] = {}
    for line in text.splitlines():
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith("/") or int(fields[2], 16) != 0:
            continue
        start = int(fields[0].partition("-")[0], 16)
        found.setdefault(fields[5], Image(start, fields[5]))
    return list(found.values())


def images(proc: Proc, pid: int) -> list[Image]:
    """Mapped files of a process, its executable first; empty where they cannot be read."""
    found = parse_maps(proc.text(f"{pid}/maps"))
    exe = proc.link(f"{pid}/exe")
    return sorted(found, key=lambda image: image.path != exe)


def gnu_hash(name: str) -> int:
    """The hash of DT_GNU_HASH."""
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


class Symbols:
    """Dynamic symbols of one mapped image.

    Args:
        read: Memory of the process.
        base: Address of the first byte of the image.

    Raises:
        ElfError: It is not a 64-bit little-endian ELF image with a GNU hash table.
    """

    def __init__(self, read: Read, base: int) -> None:
        self._read = read
        try:
            self._open(base)
        except (OSError, struct.error) as error:
            raise ElfError("the image cannot be read") from error

    def _open(self, base: int) -> None:
        head = self._read(base, 64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise ElfError("not a 64-bit little-endian ELF image")
        offset = struct.unpack_from("<Q", head, 32)[0]
        size, count = struct.unpack_from("<HH", head, 54)
        table = self._read(base + offset, size * count)
        loads: list[int] = []
        dynamic = None
        for at in range(0, size * count, size):
            kind, _, _, address = struct.unpack_from("<IIQQ", table, at)
            if kind == _PT_LOAD:
                loads.append(address)
            elif kind == _PT_DYNAMIC:
                dynamic = (address, struct.unpack_from("<Q", table, at + 40)[0])
        if not loads or dynamic is None:
            raise ElfError("a static image")
        self._bias = base - min(loads) // _PAGE * _PAGE
        tags: dict[int, int] = {}
        raw = self._read(self._bias + dynamic[0], dynamic[1])
        for at in range(0, len(raw) - 15, 16):
            tag, value = struct.unpack_from("<QQ", raw, at)
            if tag == 0:
                break
            tags.setdefault(tag, value)
        try:
            self._strings = self._absolute(tags[_DT_STRTAB])
            self._symbols = self._absolute(tags[_DT_SYMTAB])
            table_at = self._absolute(tags[_DT_GNU_HASH])
        except KeyError as error:
            raise ElfError("no dynamic symbol table") from error
        self._buckets, self._first, bloom, _ = struct.unpack("<IIII", self._read(table_at, 16))
        self._bucket_at = table_at + 16 + 8 * bloom
        self._chain_at = self._bucket_at + 4 * self._buckets

    def _absolute(self, value: int) -> int:
        """The loader of most platforms has already added the load address; others leave it."""
        return value if value >= self._bias else value + self._bias

    def find(self, name: str) -> int | None:
        """Address of a defined function; None where the image has none of that name."""
        wanted = gnu_hash(name)
        if not self._buckets:
            return None
        try:
            index = self._word(self._bucket_at + 4 * (wanted % self._buckets))
            if index < self._first:
                return None
            for at in range(index, index + _MAX_CHAIN):
                stored = self._word(self._chain_at + 4 * (at - self._first))
                if stored | 1 == wanted | 1:
                    address = self._match(at, name)
                    if address is not None:
                        return address
                if stored & 1:
                    return None
        except (OSError, struct.error):
            return None
        return None

    def _word(self, address: int) -> int:
        value: int = struct.unpack("<I", self._read(address, 4))[0]
        return value

    def _match(self, index: int, name: str) -> int | None:
        text, info, _, section, value = struct.unpack_from(
            "<IBBHQ", self._read(self._symbols + 24 * index, 24)
        )
        wanted = name.encode() + b"\0"
        found = self._read(self._strings + text, len(wanted))
        is_function = info & 0xF == 2
        return self._bias + value if found == wanted and section and is_function else None


def resolve(read: Read, candidates: Iterable[Image], names: Iterable[str]) -> dict[str, int]:
    """Addresses of all `names` that the images define, the first image first."""
    missing = set(names)
    found: dict[str, int] = {}
    for image in candidates:
        if not missing:
            break
        try:
            symbols = Symbols(read, image.base)
        except ElfError:
            continue
        for name in sorted(missing):
            address = symbols.find(name)
            if address is not None:
                found[name] = address
        missing -= set(found)
    return found


def no_trace(pid: int) -> AttachError:
    """The failure where the kernel refuses."""
    return AttachError(
        f"the system does not let this user trace process {pid}", NO_PTRACE, ExitCode.DENIED
    )


def open_memory(pid: int, *, write: bool = False) -> int:
    """A descriptor of /proc/PID/mem.

    Raises:
        OSError: Not permitted, or the process is gone.
    """
    return os.open(f"/proc/{pid}/mem", (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)


def reader(handle: int) -> Read:
    """`Read` on a descriptor of /proc/PID/mem."""

    def read(address: int, length: int) -> bytes:
        data = os.pread(handle, length, address)
        if len(data) != length:
            raise OSError(f"short read at {address:#x}")
        return data

    return read


def functions_of(
    proc: Proc, pid: int, python: Iterable[str], libc: Iterable[str] = ()
) -> dict[str, int]:
    """Addresses of functions of Python and of the C library in a process.

    Raises:
        AttachError: Its memory cannot be read, or it has no such functions.
    """
    found = images(proc, pid)
    try:
        handle = open_memory(pid)
    except PermissionError as error:
        raise no_trace(pid) from error
    except OSError as error:
        raise AttachError(f"process {pid} is gone", code=ExitCode.NOT_FOUND) from error
    try:
        names = [image.name for image in found]
        if any(name.startswith(("ld-musl", "libc.musl")) for name in names):
            raise AttachError(f"process {pid} uses musl, and only glibc is known")
        pythons = [image for image in found[1:] if image.name.startswith("libpython")]
        libcs = [i for i in found if i.name.startswith(("libc.so", "libc-2", "libpthread"))]
        functions = resolve(reader(handle), [*found[:1], *pythons], python)
        functions |= resolve(reader(handle), libcs, libc)
    finally:
        os.close(handle)
    missing = [name for name in (*python, *libc) if name not in functions]
    if missing:
        raise AttachError(f"process {pid} has no function {missing[0]}: it is not CPython on glibc")
    return functions


def python_version(proc: Proc, pid: int) -> tuple[int, int] | None:
    """Version of the Python of a process from its mapped files; None: not told by their names."""
    for image in images(proc, pid):
        match = re.fullmatch(r"(?:python|libpython)([0-9])\.([0-9]{1,3}).*", image.name)
        if match is not None:
            return int(match[1]), int(match[2])
    return None
