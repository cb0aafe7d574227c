"""Takes out of snapshots what tells whose they are, the same way everywhere.

Replaced: request ids, model names and paths, LoRA names, host names and addresses, user
names, home directories, command lines, GPU serials, and each of these inside free text.
Kept: numbers, times, pids, ports, loopback addresses, vLLM's own words, file names of Python
frames below `site-packages` or a well-known package.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import replace

from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Gpu, GpuProcess, Request, Snapshot, SourceStatus, Stacks

_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}(?:\.\d{1,3}){3}|\[[0-9A-Fa-f:%.\w]*:[0-9A-Fa-f:%.\w]*\])(?!\w|\.\d)"
)
_IPV6 = re.compile(r"(?<![\w:.\[])(?:[0-9A-Fa-f]*:){2,}[0-9A-Fa-f.]*(?![\w:])")
"""What may be an address without brackets; times of day are not, see `_ipv6`."""
_LOGIN = re.compile(r"(?<=://)[^\s/@]+@")
_URL_HOST = re.compile(r"(?<=://)[^\s/:'\"\[\],;]+")
_QUOTED_HOST = re.compile(r"(?<=--host )'([^']+)'")
_HOST_AND_PORT = re.compile(
    r"(?<![\w.:/-])(?=[\d.-]*[A-Za-z])(?!pid:|line:|port:)([\w-]+(?:\.[\w-]+)*)(?=:\d{2,5}(?![\w:.]))"
)
_DOMAIN = re.compile(
    r"(?<![\w./-])[\w-]+(?:\.[\w-]+)*"
    r"\.(?:internal|local|localdomain|lan|home|intra|corp|cluster|com|net|org|edu|gov|io|ai|dev|cloud)"
    r"(?:\.[a-z]{2})?(?![\w-]|\.\w)"
)
"""A full host name without a port; other dotted words are those of Python modules."""
_SOURCE_FILE = re.compile(r".*\.(?:py|pyx|so|c|cc|cpp|cu|h|rs)")
_SOCKET = re.compile(r"(?<![\w/.])[^\s:'\"]+\.sock\b")
_SERVER = re.compile(r"(\[[^\]\s]*\]|[^/:\s]+)(:\d+)?(/.*)?")
_PATH = re.compile(r"(?<![\w/.])/(?:[^\s/:'\"]+/)+[^\s/:'\"]*")
_KNOWN_PATH = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+)/(.*)$")
_PACKAGES = ("vllm/", "torch/", "transformers/", "triton/", "kvtop/", "uvloop/", "asyncio/")
_TITLE = re.compile(r"VLLM::\w+")
_PROCESS = re.compile(r'process (\d+):"(.*?)"(?=;process \d+:"|$)')
"""py-spy's mark of a process in a folded stack: pid and command line, which may hold `;`."""
_FRAME = re.compile(r"(.*) \(([^()]*?)(:\d+)?\)")
_LOOPBACK = {"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"}  # noqa: S104 - compared, not bound


class Anonymizer:
    """One consistent replacement: the same original always gets the same stand-in.

    Args:
        known: Originals by kind that are replaced in free text from the start.
    """

    def __init__(self, known: Iterable[tuple[str, str]] = ()) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._by_kind: dict[str, int] = {}
        self._pattern: re.Pattern[str] | None = None
        self._texts: dict[str, str] = {}
        self._free: dict[str, str] = {}
        self._stand_ins: set[str] = set()
        for kind, original in known:
            self.name(kind, original)

    @classmethod
    def of_this_machine(cls) -> Anonymizer:
        """One that knows this machine's host and user names."""
        known = [("host", socket.gethostname())]
        with contextlib.suppress(KeyError, OSError):
            known.append(("user", getpass.getuser()))
        return cls(known)

    def name(self, kind: str, original: str) -> str:
        """The stand-in for one original, for example `request-3`."""
        found = self._names.get((kind, original))
        if found is None:
            number = self._by_kind[kind] = self._by_kind.get(kind, 0) + 1
            found = self._names[kind, original] = f"{kind}-{number}"
            self._stand_ins.add(found)
            # Request ids come in thousands and are looked for in free text one by one.
            if original and kind != "request":
                self._learn(original, found)
        return found

    def _learn(self, original: str, shown: str) -> None:
        """Replace an original in free text from now on."""
        self._free.setdefault(original, shown)
        self._texts.clear()
        self._pattern = None

    def text(self, text: str) -> str:
        """Free text with every known original, address and path replaced."""
        if not text:
            return text
        done = self._texts.get(text)
        if done is None:
            done = self._scrub(text)
            if len(self._texts) > 10_000:
                self._texts.clear()
            self._texts[text] = done
        return done

    def _scrub(self, text: str) -> str:
        if self._pattern is None:
            words = sorted(self._free, key=len, reverse=True)
            inner = "|".join(re.escape(word) for word in words) or r"(?!)"
            self._pattern = re.compile(rf"(?<![^\W_])(?:{inner})(?![^\W_])")
        text = self._pattern.sub(lambda found: self._free[found.group(0)], text)
        for (kind, original), stand_in in self._names.items() if len(text) > 8 else ():
            if kind == "request" and len(original) > 3 and original in text:
                text = text.replace(original, stand_in)
        text = _LOGIN.sub("", text)
        text = _QUOTED_HOST.sub(lambda found: f"'{self._met(found[1])}'", text)
        for pattern in (_ADDRESS, _URL_HOST, _HOST_AND_PORT, _DOMAIN):
            text = pattern.sub(lambda found: self._met(found.group(0)), text)
        text = _IPV6.sub(lambda found: self._ipv6(found.group(0)), text)
        text = _PATH.sub(lambda found: self.path(found.group(0)), text)
        return _SOCKET.sub(lambda found: self.name("path", found.group(0)), text)

    def _met(self, host: str) -> str:
        """A host met in free text, where stand-ins and places in code look like one."""
        if host in self._stand_ins or _SOURCE_FILE.fullmatch(host):
            return host
        user, at, name = host.rpartition("@")
        return f"{self.name('user', user)}@{self.host(name)}" if at and user else self.host(host)

    def _ipv6(self, text: str) -> str:
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            return text
        return self.host(text)

    def host(self, host: str) -> str:
        """The stand-in for a host; loopback is kept."""
        bare = host.strip("[]")
        if bare in _LOOPBACK:
            return host
        found = self.name("host", bare)
        # A machine is called by the first word of its full name as well.
        word = bare.partition(".")[0]
        if len(word) > 2 and not word.isdecimal() and ":" not in word and word not in self._free:
            self._learn(word, found)
        return found

    def server(self, server: str) -> str:
        """`HOST:PORT`, with or without a root path, `unix:PATH` or `pid N` without its names."""
        if re.fullmatch(r"pid \d+", server):
            return server
        if server.startswith("unix:"):
            return f"unix:{self.name('path', server[5:])}"
        found = _SERVER.fullmatch(server)
        if found is None:
            return self.host(server)
        place, root = f"{self.host(found[1])}{found[2] or ''}", found[3] or ""
        if len(root) < 2:
            return place + root
        shown = f"{place}/{self.name('path', root)}"
        if server not in self._free:
            # In free text the root path is told from what is before it.
            self._learn(server, shown)
        return shown

    def source(self, name: str) -> str:
        """The name of a source; that of a page of metrics is its server's address."""
        kind, blank, server = name.partition(" ")
        if kind == "metrics" and server and " " not in server:
            return f"{kind}{blank}{self.server(server)}"
        return self.text(name)

    def path(self, path: str) -> str:
        """The part of a path that many machines share, else only a stand-in."""
        known = _KNOWN_PATH.search(path)
        if known:
            return known.group(1)
        for package in _PACKAGES:
            if path.startswith(package):
                return path
            _, found, rest = path.rpartition("/" + package)
            if found:
                return package + rest
        return path if "/" not in path else self.name("path", path)

    def command(self, command: str) -> str:
        """A command line; vLLM's own process titles are kept."""
        return command if _TITLE.fullmatch(command) else self.name("command", command)

    def snapshot(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot without its originals."""
        host = self.host(snapshot.host)
        # Engines first: names found there are then known in the free text of sources.
        engines = tuple(self._engine(engine) for engine in snapshot.engines)
        for source in snapshot.sources:
            self.source(source.name)
        gpus = tuple(self._gpu(gpu) for gpu in snapshot.gpus)
        return replace(
            snapshot,
            host=host,
            engines=engines,
            gpus=gpus,
            sources=tuple(self._source(source) for source in snapshot.sources),
            stacks=tuple(self._stacks(stacks) for stacks in snapshot.stacks),
        )

    def detail(self, detail: Detail) -> Detail:
        """A block table without its originals."""
        return replace(
            detail,
            request_id=self.name("request", detail.request_id),
            shared_with={
                block: tuple(self.name("request", other) for other in others)
                for block, others in detail.shared_with.items()
            },
            error=self.text(detail.error),
        )

    def capture(self, capture: StackCapture) -> StackCapture:
        """Captured stacks without their originals."""
        stacks: dict[str, int] = {}
        for line in capture.folded.splitlines():
            stack, _, number = line.rpartition(" ")
            # Two stacks may differ in nothing but a name that is replaced.
            shown = self.stack(stack)
            stacks[shown] = stacks.get(shown, 0) + (int(number) if number.isdecimal() else 0)
        folded = "".join(f"{stack} {count}\n" for stack, count in stacks.items())
        return replace(capture, outcome=self.text(capture.outcome), folded=folded)

    def stack(self, stack: str) -> str:
        """A folded stack; command lines of processes and thread names may hold anything."""
        head, mark, frames = stack.rpartition(";thread (") if _PROCESS.match(stack) else ("",) * 3
        if not mark and _PROCESS.match(stack):
            head, _, frames = stack.rpartition('";')
            head += '"'
        parts = [
            f'process {found[1]}:"{self.command(found[2]).replace(";", " ")}"'
            for found in _PROCESS.finditer(head)
        ]
        if mark:
            thread, _, frames = frames.partition(";")
            number, closed, name = thread.partition(")")
            parts.append(f"thread ({number}){closed and self.text(name)}")
        elif not head:
            frames = stack
        parts += [self._label(label) for label in frames.split(";")] if frames else []
        return ";".join(parts)

    def _label(self, label: str) -> str:
        """A frame as py-spy writes it: `f (a.py:3)`."""
        found = _FRAME.fullmatch(label)
        if found is None:
            return self.text(label)
        return f"{found[1]} ({self.path(found[2])}{found[3] or ''})"

    def _engine(self, engine: Engine) -> Engine:
        return replace(
            engine,
            server=self.server(engine.server),
            model=None if engine.model is None else self.name("model", engine.model),
            requests=None
            if engine.requests is None
            else tuple(self._request(request) for request in engine.requests),
            probe_reason=self.text(engine.probe_reason),
            last_snapshot=None if engine.last_snapshot is None else self.path(engine.last_snapshot),
        )

    def _request(self, request: Request) -> Request:
        return replace(
            request,
            id=self.name("request", request.id),
            lora=None if request.lora is None else self.name("lora", request.lora),
        )

    def _gpu(self, gpu: Gpu) -> Gpu:
        return replace(
            gpu,
            uuid=None if gpu.uuid is None else self.name("GPU", gpu.uuid),
            processes=None
            if gpu.processes is None
            else tuple(self._process(process) for process in gpu.processes),
            error=None if gpu.error is None else self.text(gpu.error),
        )

    def _process(self, process: GpuProcess) -> GpuProcess:
        command = process.command
        return replace(process, command=None if command is None else self.command(command))

    def _source(self, source: SourceStatus) -> SourceStatus:
        return replace(
            source,
            name=self.source(source.name),
            reason=self.text(source.reason),
            remedy=self.text(source.remedy),
        )

    def _stacks(self, stacks: Stacks) -> Stacks:
        return replace(
            stacks,
            frames=tuple(
                replace(frame, file=self.path(frame.file), thread=self.text(frame.thread))
                for frame in stacks.frames
            ),
        )
