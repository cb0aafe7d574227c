"""The black box: the last minutes on disk, written out when something happens."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.model.history import engine_key
from kvtop.model.snapshot import Finding, Snapshot
from kvtop.session.anonymize import Anonymizer
from kvtop.session.recorder import Recorder, RecorderStatus

_SEVERITIES = ("info", "warning", "critical")


@dataclass(frozen=True, slots=True)
class TriggerRules:
    """What makes the black box write."""

    severity: str | None = "critical"
    """A new finding of this severity or worse. None: findings do not."""
    gpu_mem_percent: float | None = 98.0
    """GPU memory use reaching this share, 0-100. None: it does not."""
    alloc_failures: int | None = 50
    """This many failed allocations within `burst_s`. None: they do not."""
    burst_s: float = 10.0
    """Window of a burst."""
    engine_death: bool = True
    """An engine's process is gone."""
    cooldown_s: float = 60.0
    """After one trigger the same one is quiet for so long."""


class Triggers:
    """Says when to write. Pure: it knows only the snapshots it is given.

    Args:
        rules: What counts.
    """

    def __init__(self, rules: TriggerRules) -> None:
        self._rules = rules
        self._last: dict[str, float] = {}
        self._findings: set[tuple[str, int | None]] = set()
        self._full: set[int] = set()
        self._alive: dict[str, bool] = {}
        self._failures: dict[str, deque[tuple[float, int]]] = {}

    def check(self, snapshot: Snapshot, findings: Iterable[Finding] = ()) -> str | None:
        """Take the next snapshot.

        Returns:
            One plain line that says what happened, or None.
        """
        reasons = [
            *self._new_findings(findings),
            *self._memory(snapshot),
            *self._bursts(snapshot),
            *self._deaths(snapshot),
        ]
        now = snapshot.mono_s
        for kind, text in reasons:
            last = self._last.get(kind)
            if last is None or now - last >= self._rules.cooldown_s or now < last:
                self._last[kind] = now
                return text
        return None

    def _new_findings(self, findings: Iterable[Finding]) -> list[tuple[str, str]]:
        if self._rules.severity is None:
            return []
        least = _SEVERITIES.index(self._rules.severity)
        bad = {
            (finding.rule, finding.engine_pid): finding
            for finding in findings
            if finding.severity in _SEVERITIES and _SEVERITIES.index(finding.severity) >= least
        }
        new = [finding for key, finding in bad.items() if key not in self._findings]
        self._findings = set(bad)
        return [(f"finding {finding.rule}", f"finding {finding.rule}") for finding in new]

    def _memory(self, snapshot: Snapshot) -> list[tuple[str, str]]:
        limit = self._rules.gpu_mem_percent
        if limit is None:
            return []
        full = set()
        for gpu in snapshot.gpus:
            if gpu.mem_used_bytes is None or not gpu.mem_total_bytes:
                continue
            if 100.0 * gpu.mem_used_bytes / gpu.mem_total_bytes >= limit:
                full.add(gpu.index)
        new = sorted(full - self._full)
        self._full = full
        return [(f"gpu {index} memory", f"GPU {index} memory over {limit:g} %") for index in new]

    def _bursts(self, snapshot: Snapshot) -> list[tuple[str, str]]:
        out = []
        for engine in snapshot.engines:
            failures = None if engine.counters is None else engine.counters.alloc_failures
            if failures is None or self._rules.alloc_failures is None:
                continue
            key = engine_key(engine)
            past = self._failures.setdefault(key, deque())
            if past and failures < past[-1][1]:
                past.clear()
            past.append((snapshot.mono_s, failures))
            while len(past) > 1 and snapshot.mono_s - past[0][0] > self._rules.burst_s:
                past.popleft()
            if failures - past[0][1] >= self._rules.alloc_failures:
                out.append((f"{key} allocations", f"{failures - past[0][1]} failed allocations"))
        return out

    def _deaths(self, snapshot: Snapshot) -> list[tuple[str, str]]:
        if not self._rules.engine_death:
            return []
        now = {engine_key(engine): engine.alive for engine in snapshot.engines if engine.pid}
        dead = [key for key, alive in self._alive.items() if alive and not now.get(key, False)]
        self._alive = now
        return [(f"{key} death", f"engine {key} is gone") for key in dead]


class BlackBox:
    """A ring of the last minutes, and the files written from it.

    Args:
        directory: Where the ring and the files are; made when it is not there.
        keep_s: How much the ring holds.
        rules: What makes it write by itself.
        interval_s: How often a snapshot is meant to come.
        anonymizer: Applied before anything is written.
        most: Most files it writes by itself: a disk is not filled by a fault that repeats.
    """

    def __init__(
        self,
        directory: Path,
        keep_s: float = 600.0,
        *,
        rules: TriggerRules | None = None,
        interval_s: float | None = None,
        anonymizer: Anonymizer | None = None,
        most: int = 16,
    ) -> None:
        self._directory = directory
        self._triggers = Triggers(rules or TriggerRules())
        self._most = most
        self._ring = directory / f"kvtop-ring-{os.getpid()}.kvtop"
        self._recorder = Recorder(
            self._ring, interval_s=interval_s, anonymizer=anonymizer, keep_s=keep_s
        )
        self._last: Snapshot | None = None
        self._written: list[Path] = []
        self._messages: deque[str] = deque(maxlen=32)

    def start(self) -> None:
        """Make the ring.

        Raises:
            StorageError, DeniedError, NotFoundError: It cannot be made.
        """
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
        # A ring of a process of the same number that is long gone.
        self._remove_ring()
        self._recorder.start()

    def offer(self, snapshot: Snapshot, findings: Iterable[Finding] = ()) -> str | None:
        """Take the next snapshot; returns at once.

        Args:
            snapshot: To keep.
            findings: What holds now.

        Returns:
            What made it write, or None.
        """
        self._last = snapshot
        self._recorder.offer(snapshot)
        reason = self._triggers.check(snapshot, findings)
        if reason is not None and len(self._written) < self._most:
            self.write(reason)
            return reason
        return None

    def capture(self, capture: StackCapture) -> None:
        """Keep captured stacks; those that a finding asked for are written out with the ring.

        The finding itself has made it write already, half a minute before they were there.
        """
        self._recorder.capture(capture)
        if capture.why and capture.folded and len(self._written) < self._most:
            self.write(f"stacks for {capture.why}")

    def detail(self, engine_pid: int | None, detail: Detail) -> None:
        """Keep the block table of a request."""
        self._recorder.detail(engine_pid, detail)

    def write(self, reason: str) -> Path:
        """Write the ring out now, for example at a key; returns at once.

        Returns:
            The file that will be there; `messages` tells how it went.
        """
        time_s = 0.0 if self._last is None else self._last.time_s
        moment = datetime.fromtimestamp(time_s, timezone.utc)
        word = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:40]
        base = f"kvtop-blackbox-{moment:%Y%m%dT%H%M%SZ}-{word}"
        path = self._directory / f"{base}.kvtop"
        number = 2
        while path in self._written or path.exists():
            path = self._directory / f"{base}-{number}.kvtop"
            number += 1
        self._written.append(path)

        def report(problem: str) -> None:
            self._messages.append(f"{path}: {problem}" if problem else f"wrote {path}: {reason}")

        self._recorder.request_dump(path, f"black box: {reason}", report)
        return path

    def messages(self) -> list[str]:
        """What happened since the last call, one plain line each."""
        out = []
        while self._messages:
            out.append(self._messages.popleft())
        return out

    @property
    def status(self) -> RecorderStatus:
        """How the ring is doing."""
        return self._recorder.status

    def stop(self, timeout_s: float = 2.0) -> None:
        """Finish what is being written and take the ring away."""
        self._recorder.stop("black box stopped", timeout_s)
        self._remove_ring()

    def _remove_ring(self) -> None:
        for path in (self._ring, self._ring.with_name(self._ring.name + "-journal")):
            with contextlib.suppress(OSError):
                path.unlink()
