"""Takes out of snapshots what tells whose they are, the same way everywhere.

Replaced: request ids, model names and paths, LoRA names, host names and addresses, user
names, home directories, command lines, GPU serials, and each of these inside free text.
Kept: numbers, times, pids, ports, vLLM's own words, file names of Python frames below
`site-packages` or a well-known package.
"""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
from collections.abc import Iterable
from dataclasses import replace

from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Gpu, GpuProcess, Request, Snapshot, SourceStatus, Stacks

_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}(?:\.\d{1,3}){3}|\[[0-9A-Fa-f:%.\w]*:[0-9A-Fa-f:%.\w]*\])(?![\w.])"
)
_PATH = re.compile(r"(?<![\w/.])/(?:[^\s/:'\"]+/)+[^\s/:'\"]*")
_KNOWN_PATH = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+)/(.*)$")
_PACKAGES = ("vllm/", "torch/", "transformers/", "triton/", "kvtop/", "uvloop/", "asyncio/")
_TITLE = re.compile(r"VLLM::\w+")
_PROCESS = re.compile(r'process (\d+):"(.*?)"(?=;process \d+:"|$)')
"""py-spy's mark of a process in a folded stack: pid and command line, which may hold `;`."""
_FRAME = re.compile(r"(.*) \(([^()]*?)(:\d+)?\)")
_LOOPBACK = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}  # noqa: S104 - compared, not bound


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
            # Request ids come in thousands and are looked for in free text one by one.
            if original and kind != "request":
                self._free.setdefault(original, found)
                self._texts.clear()
                self._pattern = None
        return found

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
        text = _ADDRESS.sub(lambda found: self.host(found.group(0)), text)
        return _PATH.sub(lambda found: self.path(found.group(0)), text)

    def host(self, host: str) -> str:
        """The stand-in for a host; loopback is kept."""
        bare = host.strip("[]")
        if bare in _LOOPBACK:
            return host
        found = self.name("host", bare)
        # A machine is called by the first word of its full name as well.
        word = bare.partition(".")[0]
        if len(word) > 2 and not word.isdecimal() and ":" not in word and word not in self._free:
            self._free[word] = found
            self._texts.clear()
            self._pattern = None
        return found

    def server(self, server: str) -> str:
        """`HOST:PORT` or `pid N` without the host."""
        host, colon, port = server.rpartition(":")
        if colon and port.isdecimal():
            return f"{self.host(host)}:{port}"
        return server if re.fullmatch(r"pid \d+", server) else self.host(server)

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
            name=self.text(source.name),
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
