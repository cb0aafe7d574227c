"""The root-cause table: leak findings, and beside them what the engine's code was doing.

Facts beside facts: a capture does not know request ids, so nothing here claims that a
stack belongs to a request. What can be read from it is which of taking and giving back
blocks happens at all, and from where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtop.flame.folded import Folded, code_of
from kvtop.flame.tree import category_of
from kvtop.model.frames import (
    ABORT,
    ALLOCATE,
    CATEGORIES,
    CONNECTOR,
    FREE,
    PREEMPT,
    label_category,
    split_frame,
)
from kvtop.model.snapshot import Finding

SITES = (ALLOCATE, FREE, PREEMPT, ABORT, CONNECTOR)
"""Categories whose call sites are listed."""
_SITES_EACH = 3
_CALLERS = 3
_IDS = 6


@dataclass(frozen=True, slots=True)
class Site:
    """A place that takes or gives back blocks."""

    category: str
    """What it does."""
    label: str
    """Its frame, the outermost of its category in the stack."""
    callers: tuple[str, ...]
    """Functions that led to it, the nearest first."""
    count: int
    """Samples in it."""


def wanted(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that the table is about: blocks that do not come back."""
    return [finding for finding in findings if finding.rule.startswith("leak.")]


def key_of(finding: Finding) -> str:
    """What tells one finding from the others; the same at each moment it holds."""
    return f"{finding.rule} {finding.engine_pid} {finding.since_s!r}"


def sites(folded: Folded) -> list[Site]:
    """Call sites by category, in the order of `SITES`, the one with most samples first."""
    seen: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for frames, count in folded.stacks:
        code = code_of(frames)
        for at, label in enumerate(code):
            category = label_category(label)
            if category in SITES and category is not None:
                callers = tuple(
                    split_frame(caller)[0] for caller in code[max(at - _CALLERS, 0) : at][::-1]
                )
                seen[category, label, callers] += count
                break
    found = [Site(*key, count) for key, count in seen.items()]
    found.sort(key=lambda site: (SITES.index(site.category), -site.count, site.label))
    return found


def split(folded: Folded) -> dict[str, float]:
    """Share of each category in the samples, 0-100, in the order of `CATEGORIES`."""
    sums: Counter[str] = Counter()
    for frames, count in folded.stacks:
        sums[category_of(frames)] += count
    total = sum(sums.values())
    return {name: 100.0 * sums[name] / total for name in CATEGORIES if sums[name]}


def table(
    findings: Sequence[Finding],
    shares: Mapping[str, float],
    found: Sequence[Site] | None,
    rates: Mapping[str, float | None],
    samples: int,
    now_s: float,
    watched_s: float | None = None,
    until_s: Mapping[str, float] | None = None,
) -> list[str]:
    """The lines of the table; text from outside in them is not yet made safe.

    Args:
        findings: From `wanted`.
        shares: From `split`, or of the top frames of a session; may be empty.
        found: From `sites`. None: there are no whole stacks, as in a session.
        rates: Blocks a second by name (`allocated`, `freed`, `touched`, `evicted`).
        samples: Samples in the capture.
        now_s: Unix time that ages are taken against.
        watched_s: For how long findings were looked for. None: over a whole session.
        until_s: When those that hold no more were last seen, by `key_of`, Unix time.
    """
    lines: list[str] = []
    if not findings:
        lines.append("No ghost, zombie or other leak was found.")
        if watched_s is not None:
            lines.append(
                f"Watched for {_span(watched_s)}; a leak is told when it has held for a while,"
                " so a longer --for or a session may show more."
            )
        lines.append("")
    for finding in findings:
        until = (until_s or {}).get(key_of(finding))
        age = max((now_s if until is None else until) - finding.since_s, 0.0)
        where = f" engine {finding.engine_pid}" if finding.engine_pid is not None else ""
        over = "" if until is None else f"; over since {_span(max(now_s - until, 0.0))}"
        lines.append(f"{finding.severity} {finding.rule}{where}, for {_span(age)}{over}")
        lines.append(f"  {finding.summary}")
        if finding.request_ids:
            lines.append(f"  requests  {_some(finding.request_ids)}")
        if finding.block_ids:
            lines.append(f"  blocks    {_some([str(block) for block in finding.block_ids])}")
        if finding.next_step:
            lines.append(f"  do        {finding.next_step}")
        lines.append("")
    lines.append("Blocks a second, from the probe")
    lines.append("  " + "   ".join(f"{name} {_rate(rates.get(name))}" for name in _RATES))
    lines += ["", f"What the code was doing, {samples:,} samples"]
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        lines.append(f"  {name:<10} {share:5.1f}%")
    if not shares:
        lines.append("  nothing was sampled")
    if found is None:
        lines += ["", "No flame graph was recorded in this session; --view FILE adds one."]
    elif shares:
        lines += ["", "Where blocks are taken and given back (samples, function, callers)"]
        for category in SITES:
            rows = [site for site in found if site.category == category]
            if not rows:
                lines.append(f"  {category:<10} none seen")
            for site in rows[:_SITES_EACH]:
                path = " < ".join(site.callers)
                lines.append(f"  {category:<10} {site.count:>6,}  {site.label}  < {path}")
            if len(rows) > _SITES_EACH:
                lines.append(f"  {'':<10} and {len(rows) - _SITES_EACH} more places")
    note = balance(rates)
    if note:
        lines += ["", note]
    return lines


_RATES = ("allocated", "freed", "touched", "evicted")


def balance(rates: Mapping[str, float | None]) -> str:
    """One sentence on taking against giving back; empty when it is not known."""
    allocated, freed, touched = (rates.get(name) for name in ("allocated", "freed", "touched"))
    if allocated is None or freed is None:
        return ""
    taken = allocated + (touched or 0.0)
    change = taken - freed
    if taken == 0 and freed == 0:
        return "No block was taken or given back meanwhile."
    if abs(change) <= 0.05 * max(taken, freed):
        return "As many blocks are given back as are taken."
    word = "taken than given back" if change > 0 else "given back than taken"
    return f"{abs(change):.1f} blocks a second more are {word}."


def _some(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:_IDS])
    return shown + (f" and {len(ids) - _IDS} more" if len(ids) > _IDS else "")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"
