"""Every panel as text, at several sizes, healthy and not; one file a panel in `golden/`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvtop.draw import detail, findings, gpu, kv, requests, stacks, status, trend
from kvtop.draw.player import timeline_line
from kvtop.draw.view import Baseline, Line, Mark, Player, View
from kvtop.model.history import engine_key
from kvtop.model.snapshot import Snapshot, SourceState
from tests.draw import samples
from tests.draw.golden import Golden, exact

PLAIN = replace(samples.VIEW, history=samples.history())
ASCII = replace(PLAIN, ascii=True)

Title = Callable[[Snapshot, View, int], str]
Panel = Callable[[Snapshot, View, int, int], list[Line]]


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def _draw(
    name: str,
    title: Title | None,
    panel: Panel,
    cases: dict[str, tuple[Snapshot, View]],
    sizes: tuple[tuple[int, int], ...],
) -> None:
    golden = Golden(name)
    for width, height in sizes:
        for case, (snap, view) in cases.items():
            lines = exact(panel(snap, view, width, height), width, height)
            golden.add(
                f"{case} {width}x{height}", lines, title(snap, view, width) if title else None
            )
    golden.check()


def test_kv() -> None:
    stale = samples.with_source(
        "engine",
        state=SourceState.FAILED,
        reason="no answer in 1 s",
        value_time_s=samples.NOW - 12,
    )
    cases = {
        "healthy": (samples.HEALTHY, PLAIN),
        "ascii": (samples.HEALTHY, ASCII),
        "broken": (samples.BROKEN, PLAIN),
        "no probe": (samples.NO_PROBE, PLAIN),
        "huge": (samples.HUGE, PLAIN),
        "stale": (stale, PLAIN),
        "gone": (samples.with_engine(alive=False), PLAIN),
        "empty": (samples.EMPTY, PLAIN),
    }
    _draw("kv", kv.title, kv.kv_panel, cases, ((98, 9), (63, 8), (37, 6), (20, 4), (30, 1)))


def test_gpu() -> None:
    lost = replace(
        samples.HEALTHY,
        gpus=(
            replace(samples.GPU, index=0, error="GPU is lost; reset it or reboot"),
            replace(samples.GPU, index=1, processes=None, util_percent=None),
        ),
    )
    unified = replace(
        samples.HEALTHY, gpus=(replace(samples.GPU, mem_is_system=True, processes=None),)
    )
    cases = {
        "healthy": (samples.HEALTHY, PLAIN),
        "ascii": (samples.HEALTHY, ASCII),
        "none": (samples.NO_GPU, PLAIN),
        "lost": (lost, PLAIN),
        "lost, other one": (lost, replace(PLAIN, gpu=1)),
        "unified memory": (unified, PLAIN),
        "nothing known": (replace(samples.HEALTHY, gpus=(samples.Gpu(0),)), PLAIN),
    }
    _draw("gpu", gpu.title, gpu.gpu_panel, cases, ((60, 14), (44, 6), (28, 4)))


def test_requests() -> None:
    cases = {
        "healthy": (samples.HEALTHY, PLAIN),
        "ascii": (samples.HEALTHY, ASCII),
        "search": (samples.HEALTHY, replace(PLAIN, search="CCC", sort="AGE", reverse=False)),
        "hostile": (samples.HOSTILE, PLAIN),
        "huge": (samples.HUGE, PLAIN),
        "no probe": (samples.NO_PROBE, PLAIN),
        "none": (samples.with_engine(requests=()), PLAIN),
    }
    sizes = ((158, 12), (78, 7), (40, 7), (18, 4))
    _draw("requests", requests.title, requests.requests_panel, cases, sizes)


def test_detail() -> None:
    view = replace(PLAIN, detail=samples.DETAIL)
    gone = replace(PLAIN, detail=replace(samples.DETAIL, request_id="old\x07"))
    failed = replace(
        PLAIN, detail=samples.Detail("cmpl-aaaa", error="the probe does not answer; is it alive?")
    )
    hybrid = replace(
        PLAIN,
        detail=samples.Detail(
            "cmpl-aaaa",
            step=7,
            tables=((0, 16, (40, 41, 42)), (1, 16, (0, 0, 700, 1990))),
            refs=((1, 1, 3), (0, 0, 1, 1)),
            shared_with={42: ("a[/x]b", "\x1b[0m", "third-request-with-a-long-name")},
        ),
    )
    cases = {
        "healthy": (samples.HEALTHY, view),
        "gone": (samples.HEALTHY, gone),
        "failed": (samples.HEALTHY, failed),
        "hybrid": (samples.HEALTHY, hybrid),
        "asked": (samples.HEALTHY, replace(PLAIN, detail=samples.Detail("cmpl-aaaa"))),
        "closed": (samples.HEALTHY, PLAIN),
    }
    _draw("detail", detail.title, detail.detail_panel, cases, ((100, 16), (50, 18), (20, 6)))


def test_stacks() -> None:
    denied = replace(
        samples.with_source(
            "stacks",
            state=SourceState.FAILED,
            reason="py-spy may not read pid 4740 (EPERM)",
            remedy="run as root, or give the container CAP_SYS_PTRACE",
        ),
        stacks=(),
    )
    stale = samples.with_source(
        "stacks", state=SourceState.FAILED, reason="timeout", value_time_s=samples.NOW - 30
    )
    worker = replace(samples.STACKS, pid=4801, role="worker")
    split = {"schedule": 14.0, "allocate": 6.5, "free": 0.4, "model": 61.0, "wait": 18.1}
    measured = replace(samples.STACKS, split=split, cost_ms=0.94, unread=12)
    hung = replace(measured, split={"wait": 100.0}, stalled=True)
    cases = {
        "healthy": (samples.HEALTHY, PLAIN),
        "measured": (replace(samples.HEALTHY, stacks=(measured,)), PLAIN),
        "stalled": (replace(samples.HEALTHY, stacks=(hung,)), PLAIN),
        "one waits": (
            replace(samples.HEALTHY, stacks=(hung, replace(measured, pid=4801, role="worker"))),
            ASCII,
        ),
        "two": (
            replace(samples.HEALTHY, stacks=(measured, replace(measured, pid=4801, role="worker"))),
            PLAIN,
        ),
        "one of two": (
            replace(samples.HEALTHY, stacks=(measured, worker)),
            replace(PLAIN, stacks_role="worker"),
        ),
        "denied": (denied, PLAIN),
        "stale": (stale, PLAIN),
        "hidden": (samples.HEALTHY, replace(PLAIN, stacks_on=False)),
        "none yet": (replace(samples.HEALTHY, stacks=(), sources=()), PLAIN),
    }
    _draw("stacks", stacks.title, stacks.stacks_panel, cases, ((120, 7), (70, 6), (40, 5), (20, 4)))


def test_trend() -> None:
    cases = {
        "healthy": (samples.HEALTHY, PLAIN),
        "ascii": (samples.HEALTHY, ASCII),
        "no history": (samples.HEALTHY, samples.VIEW),
        "one point": (samples.HEALTHY, replace(PLAIN, history=samples.history(points=1))),
    }
    _draw("trend", trend.title, trend.trend_panel, cases, ((60, 10), (30, 5), (16, 2)))


def test_nothing_found() -> None:
    looked = replace(
        samples.NO_GPU,
        engines=(),
        sources=(
            *samples.NO_GPU.sources,
            samples.SourceStatus(
                "discovery",
                "discovery",
                SourceState.OK,
                samples.NOW,
                reason="214 processes and 12 ports, none is vLLM",
                period_s=2.0,
            ),
        ),
    )
    cases = {"nothing": (samples.EMPTY, PLAIN), "looked": (looked, PLAIN)}
    _draw("nothing", None, status.nothing_found, cases, ((80, 18), (40, 16), (20, 5)))


def test_findings() -> None:
    golden = Golden("findings")
    view = replace(PLAIN, findings=samples.FINDINGS)
    second = replace(view, finding_key=findings.key_of(samples.FINDINGS[1]), ascii=True)
    for width in (110, 70, 40):
        for case, shown in {"all": view, "second, ascii": second, "none": PLAIN}.items():
            lines = findings.findings_panel(samples.HEALTHY, shown, width, 5)
            golden.add(f"{case} {width}x5", exact(lines, width, 5))
            line = findings.diagnosis_line(samples.HEALTHY, shown, width)
            golden.add(f"diagnosis {case} {width}", exact([line], width, 1))
    fine = replace(PLAIN, findings=(samples.FINE,))
    line = findings.diagnosis_line(samples.HEALTHY, fine, 90)
    golden.add("diagnosis fine 90", exact([line], 90, 1))
    opened = replace(second, ascii=False, finding=samples.FINDINGS[1])
    over = replace(opened, findings=())
    for width in (76, 40):
        for case, shown in {"open": opened, "over": over}.items():
            lines = findings.finding_panel(samples.HEALTHY, shown, ["A ghost has no owner."], width)
            golden.add(f"{case} {width}", lines)
    golden.check()


def test_timeline() -> None:
    golden = Golden("timeline")
    start = samples.NOW - 100
    marks = (
        Mark(start + 10, "marker"),
        Mark(start + 30, "finding", "critical"),
        Mark(start + 31, "preemption"),
        Mark(start + 60, "restart"),
        Mark(start + 61, "source"),
        Mark(start + 80, "finding", "info"),
    )
    player = Player(start + 50, start, start + 100, speed=0.25, marks=marks)
    cases = {
        "playing": player,
        "paused on a mark": replace(player, time_s=start + 30, playing=False, kind="finding"),
        "at the end": replace(player, time_s=start + 100, at_end=True),
        "follows": replace(player, time_s=start + 100, at_end=True, growing=True),
        "one tick": replace(player, last_s=start, time_s=start),
    }
    for width in (120, 80, 40, 12):
        for case, shown in cases.items():
            for plain in (False, True):
                line = timeline_line(shown, width, plain)
                golden.add(f"{case} {width}", exact([line], width, 1))
    golden.check()


def test_baseline() -> None:
    golden = Golden("baseline")
    counts = samples.ENGINE.pools[0].counts
    key = engine_key(samples.ENGINE)
    moved = replace(counts, used=counts.used - 214, ghost=counts.ghost - 3, free=counts.free + 217)
    cases = {
        "changed": Baseline(samples.NOW - 60, {key: moved}),
        "earlier": Baseline(samples.NOW + 60, {key: moved}),
        "same": Baseline(samples.NOW - 60, {key: counts}),
        "unknown": Baseline(samples.NOW - 60),
    }
    for width in (70, 30):
        for case, base in cases.items():
            view = replace(PLAIN, baseline=base)
            golden.add(f"{case} {width}", kv.kv_panel(samples.HEALTHY, view, width, 7))
    golden.check()


def test_sources() -> None:
    failed = samples.with_source(
        "nvml",
        state=SourceState.FAILED,
        since_s=samples.NOW - 12,
        value_time_s=samples.NOW - 13,
        reason="driver and library versions differ (535.1 and 550.2)",
        remedy="reboot, or reload the driver",
    )
    cases = {"healthy": (samples.HEALTHY, PLAIN), "failed": (failed, PLAIN)}
    _draw("sources", None, status.sources_panel, cases, ((100, 8), (50, 10)))


def test_header_and_footer() -> None:
    golden = Golden("header")
    stopped = samples.with_engine(process_state="T")
    frozen = samples.with_engine(probe=replace(samples.ENGINE.probe, step_age_s=33.0))
    cases = {
        "healthy": (samples.HEALTHY, PLAIN),
        "demo, paused": (replace(samples.HEALTHY, demo=True), replace(PLAIN, paused=True)),
        "no probe": (samples.NO_PROBE, PLAIN),
        "failed": (samples.with_source("engine", state=SourceState.FAILED), PLAIN),
        "stopped": (stopped, PLAIN),
        "no step": (frozen, PLAIN),
        "asleep": (samples.with_engine(state="sleeping"), PLAIN),
        "hostile": (samples.HOSTILE, PLAIN),
        "replay": (samples.HEALTHY, replace(PLAIN, player=Player(samples.NOW, 0.0, samples.NOW))),
        "empty": (samples.EMPTY, PLAIN),
        "two engines": (replace(samples.HEALTHY, engines=(samples.ENGINE,) * 2), PLAIN),
    }
    for width in (120, 80, 40):
        for case, (snap, view) in cases.items():
            line = status.header(snap, view, width)
            golden.add(f"{case} {width}", exact([line], width, 1))
    recorded = replace(samples.HEALTHY, dropped=3)
    golden.add("recording", [status.header(recorded, replace(PLAIN, recording="REC 1.2 MiB"), 120)])
    keys = [("F1", "Help"), ("q", "Quit"), ("/", "Search"), ("F6", "Sort"), ("Tab", "Panel")]
    typed = replace(PLAIN, search_open=True, search="abc\x1b")
    for width in (60, 20):
        for view in (PLAIN, replace(PLAIN, message="saved a[/x]b\n"), typed):
            line = status.footer(samples.HEALTHY, view, width, keys)
            golden.add(f"footer {width}", exact([line], width, 1))
    golden.check()
