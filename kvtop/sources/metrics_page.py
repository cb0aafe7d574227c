"""One /metrics page as plain numbers, whatever version of vLLM wrote it.

Names read from vLLM 0.8.5 to 0.33 (`vllm/v1/metrics/loggers.py`; V0: `vllm/engine/metrics.py`).
Only the lines that kvtop needs are parsed: a page of 600 lines costs about 2 ms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtop.sources.base import SourceError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""0.9.2 and newer, then older. Newest name first in all of these."""
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
SLEEP_STATE = "vllm:engine_sleep_state"
CACHE_CONFIG = "vllm:cache_config_info"
FINISHED = "vllm:request_success_total"
START_TIME = "process_start_time_seconds"

COUNTERS: dict[str, tuple[str, ...]] = {
    "preemptions": ("vllm:num_preemptions_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    # Moves with every batch of outputs, also while a long prompt moves no token counter.
    "iterations": ("vllm:iteration_tokens_total_count",),
}
"""kvtop's name of a counter -> its names on the wire."""
TTFT = ("vllm:time_to_first_token_seconds_bucket",)
ITL = (
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
)
"""0.10.2 and newer, then older."""

_WANTED = frozenset(
    (
        *KV_USED,
        RUNNING,
        WAITING,
        WAITING_BY_REASON,
        SLEEP_STATE,
        CACHE_CONFIG,
        FINISHED,
        START_TIME,
        *TTFT,
        *ITL,
        *(name for names in COUNTERS.values() for name in names),
    )
)
_PREFIXES = tuple(_WANTED)
MAX_LINE = 16_384
"""Characters; longer lines are dropped: the parser's time grows with their square."""
_MAX_ENGINE = 9999
_MAX_COUNT = 2.0**53
"""No count is larger; a float does not hold larger ones exactly."""
_MAX_LABEL = 200


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative buckets of one histogram."""

    bounds: tuple[float, ...]
    """Upper bounds, rising; the last is infinity."""
    counts: tuple[float, ...]
    """Observations up to each bound, since server start."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What one page says of one engine. None, or no key: no such series."""

    model: str | None = None
    """Label `model_name`."""
    kv_used: float | None = None
    """Share of blocks in use, 0-1."""
    running: int | None = None
    """Requests running."""
    waiting: int | None = None
    """Requests waiting."""
    waiting_capacity: int | None = None
    """Of these, for want of blocks or slots."""
    waiting_deferred: int | None = None
    """Of these, for something else."""
    sleep_state: str | None = None
    """The label of `engine_sleep_state` whose value is 1."""
    counters: dict[str, float] = field(default_factory=dict)
    """Keys of `COUNTERS` -> value since server start."""
    finished: dict[str, float] = field(default_factory=dict)
    """Reason -> requests since server start."""
    ttft: Histogram | None = None
    """Time to first token, seconds."""
    itl: Histogram | None = None
    """Inter-token latency, seconds."""
    cache_config: dict[str, str] = field(default_factory=dict)
    """Labels of `cache_config_info`; `None` in Python is the text `None` here."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What one page says."""

    engines: dict[int, EngineSample]
    """By `engine` label; a page without that label is engine 0."""
    start_time_s: float | None = None
    """When the server process started, Unix seconds. None: several API servers."""


def parse(text: str) -> Samples:
    """Read a page.

    Args:
        text: The body of /metrics, Prometheus text format.

    Returns:
        One `EngineSample` for every engine that any series names.

    Raises:
        SourceError: It is empty, has no vLLM series, or is not in that format.
    """
    lines = text.split("\n")
    wanted = [line for line in lines if line.startswith(_PREFIXES)]
    if not any(line.startswith("vllm:") for line in wanted):
        raise _not_vllm(text, lines)
    wanted = [line for line in wanted if len(line) <= MAX_LINE]
    # prometheus_client takes 0.08 CPU-seconds to import: only when a page has come.
    from prometheus_client.parser import text_string_to_metric_families

    page = _Page()
    try:
        page.add(text_string_to_metric_families, wanted)
    except Exception:
        # One line that is none does not take the others with it.
        page = _Page()
        first: Exception | None = None
        for line in wanted:
            try:
                page.add(text_string_to_metric_families, [line])
            except Exception as error:
                first = first or error
        if first is not None and not page.known:
            raise SourceError(
                f"the metrics page is not in Prometheus text format: {one_line(str(first), 80)}",
                "check that the address is that of a vLLM server",
            ) from first
    if page.shared_config and not page.builders:
        page.builders[0] = _Builder()
    return Samples(
        {i: page.builders[i].build(page.shared_config) for i in sorted(page.builders)},
        page.start_time_s,
    )


class _Page:
    """Collects the series of one page."""

    def __init__(self) -> None:
        self.builders: dict[int, _Builder] = {}
        self.shared_config: dict[str, str] = {}
        self.start_time_s: float | None = None
        self.known = False
        """A series of vLLM was among them."""

    def add(self, families: Callable[[str], Iterable[Metric]], lines: list[str]) -> None:
        """Adds lines; raises whatever the parser does on one that is none."""
        for family in families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name, labels, value = sample.name, sample.labels, float(sample.value)
                if name == START_TIME:
                    self.start_time_s = value if math.isfinite(value) else None
                    continue
                if name in _WANTED:
                    self._add(name, labels, value)
                self.known = True

    def _add(self, name: str, labels: dict[str, str], value: float) -> None:
        if name == CACHE_CONFIG and "engine" not in labels:
            self.shared_config = {k[:_MAX_LABEL]: v[:_MAX_LABEL] for k, v in labels.items()}
            return
        index = _engine_index(labels.get("engine", "0"))
        if index is not None:
            self.builders.setdefault(index, _Builder()).add(name, labels, value)


class _Builder:
    """Collects the series of one engine."""

    def __init__(self) -> None:
        self.model: str | None = None
        self.values: dict[str, float] = {}
        self.by_label: dict[str, dict[str, float]] = {}
        self.buckets: dict[str, dict[float, float]] = {}
        self.config: dict[str, str] = {}

    def add(self, name: str, labels: dict[str, str], value: float) -> None:
        if name == CACHE_CONFIG:
            self.config = {k[:_MAX_LABEL]: v[:_MAX_LABEL] for k, v in labels.items()}
            return
        if not math.isfinite(value) or value < 0:
            return
        if self.model is None and labels.get("model_name"):
            self.model = labels["model_name"][:_MAX_LABEL]
        if name in KV_USED:
            self.values[name] = max(value, self.values.get(name, 0.0))
        elif name.endswith("_bucket"):
            bound = float(labels["le"])
            if not math.isnan(bound):
                buckets = self.buckets.setdefault(name, {})
                buckets[bound] = buckets.get(bound, 0.0) + value
        elif name in (WAITING_BY_REASON, SLEEP_STATE, FINISHED):
            key = {WAITING_BY_REASON: "reason", SLEEP_STATE: "sleep_state"}.get(
                name, "finished_reason"
            )
            group = self.by_label.setdefault(name, {})
            label = labels.get(key, "")[:_MAX_LABEL]
            group[label] = group.get(label, 0.0) + value
        else:
            # One engine under several model names: the parts add up.
            self.values[name] = self.values.get(name, 0.0) + value

    def build(self, shared_config: dict[str, str]) -> EngineSample:
        # Values that are finite each may add up to infinity.
        values = _finite(self.values)
        by_reason = _finite(self.by_label.get(WAITING_BY_REASON, {}))
        sleeping = self.by_label.get(SLEEP_STATE, {})
        counters = {key: _first(values, names) for key, names in COUNTERS.items()}
        return EngineSample(
            model=self.model,
            kv_used=_first(values, KV_USED),
            running=_whole(values.get(RUNNING)),
            waiting=_whole(values.get(WAITING)),
            waiting_capacity=_whole(by_reason.get("capacity")),
            waiting_deferred=_whole(by_reason.get("deferred")),
            sleep_state=next((state for state, on in sleeping.items() if on == 1), None),
            counters={key: value for key, value in counters.items() if value is not None},
            finished=_finite(self.by_label.get(FINISHED, {})),
            ttft=self._histogram(TTFT),
            itl=self._histogram(ITL),
            cache_config=self.config or shared_config,
        )

    def _histogram(self, names: tuple[str, ...]) -> Histogram | None:
        for name in names:
            if name in self.buckets:
                bounds = tuple(sorted(self.buckets[name]))
                counts = tuple(self.buckets[name][b] for b in bounds)
                return Histogram(bounds, counts) if math.isfinite(sum(counts)) else None
        return None


def _first(values: dict[str, float], names: Iterable[str]) -> float | None:
    """The value under the first of the names that is there."""
    return next((values[name] for name in names if name in values), None)


def _finite(values: dict[str, float]) -> dict[str, float]:
    """Those that are numbers; the others are not known."""
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _whole(value: float | None) -> int | None:
    return None if value is None or not 0 <= value <= _MAX_COUNT else int(value)


def _engine_index(label: str) -> int | None:
    if not (label.isascii() and label.isdecimal() and len(label) <= 6):
        return None
    index = int(label)
    return index if index <= _MAX_ENGINE else None


def _not_vllm(text: str, lines: list[str]) -> SourceError:
    """Why a page has nothing for kvtop."""
    head = text.lstrip("\ufeff \t\r\n")[:1]
    if not head:
        return SourceError(
            "the metrics page is empty",
            "look at the server's log; a multi-process server may have lost its metrics directory",
        )
    if head in "<{[":
        return SourceError(
            "the answer is not a metrics page",
            "check that the address is that of a vLLM server, with its root path if it has one",
        )
    if any(line.startswith("vllm:") for line in lines):
        return SourceError(
            "the metrics page has vLLM series but none that kvtop knows",
            "this vLLM may be newer than this kvtop; look for a newer kvtop",
        )
    return SourceError(
        "the metrics page has no vLLM series",
        "start vLLM without --disable-log-stats, or check that this server is vLLM",
    )
