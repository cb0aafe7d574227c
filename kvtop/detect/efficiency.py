"""Memory that is there and does little: prefix cache, tails, uneven engines."""

from __future__ import annotations

from statistics import median

from kvtop.detect.engine_track import EngineTrack
from kvtop.detect.rule import NOTHING, Candidate, Rule, Verdict, duration
from kvtop.detect.thresholds import Thresholds
from kvtop.detect.track import Track
from kvtop.model.tokens import token_use_percent


def hit_rate_fallen(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """The prefix hit rate is far below what it used to be on this engine."""
    metrics = engine.metrics
    if metrics is None or metrics.prefix_hit_percent is None:
        return None
    now = engine.hit_now.means()[-6:]
    # What is low now must not pull the baseline down to itself.
    until = track.mono_s - max(120.0, limits.hit_s)
    before = [value for at, value in engine.hit_minutes.means() if at < until]
    if len(before) * 60.0 < limits.hit_baseline_s or len(now) < 3:
        return None
    usual = median(before)
    recent = sum(value for _, value in now) / len(now)
    if usual - recent < limits.hit_fall_points / 2 or recent > usual * 0.8:
        return NOTHING
    return (
        Candidate(
            summary=f"The prefix hit rate is {recent:.0f} %; over the last "
            f"{duration(len(before) * 60.0)} it was {usual:.0f} %. "
            "Prompts are computed that used to come from the cache.",
            start=usual - recent >= limits.hit_fall_points
            and recent < usual * limits.hit_fall_share,
            evidence={
                "hit rate now": f"{recent:.1f} %",
                "baseline": f"{usual:.1f} %, median of {len(before)} minutes",
                "since start": "-"
                if metrics.prefix_hit_total_percent is None
                else f"{metrics.prefix_hit_total_percent:.1f} %",
            },
        ),
    )


def short_prompts(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """No hits, because prompts are shorter than a block."""
    size = engine.engine.block_size
    if not engine.probe_fresh or engine.engine.requests is None or not size:
        return None
    if engine.engine.prefix_caching is not True:
        return NOTHING
    seen = engine.requests
    if seen.prompts < limits.short_prompts:
        return NOTHING
    share = seen.short_prompts / seen.prompts
    hits = engine.metrics.prefix_hit_percent if engine.metrics else None
    if share < limits.short_share or (hits is not None and hits >= 1.0):
        return NOTHING
    return (
        Candidate(
            summary=f"{100 * share:.0f} % of the prompts are shorter than a block of {size} "
            "tokens. Only full blocks are cached, so a hit rate of 0 is right here.",
            evidence={
                "prompts seen": str(seen.prompts),
                "shorter than a block": str(seen.short_prompts),
                "block": f"{size} tokens",
                "hit rate": "-" if hits is None else f"{hits:.1f} %",
            },
        ),
    )


def slack(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Many token slots of the blocks in use hold nothing."""
    used, size, totals = engine.kv_used_percent, engine.engine.block_size, engine.requests.totals
    if engine.counts is None or engine.engine.requests is None or used is None or not size:
        return None
    if totals.slack is None or not totals.owned:
        return None if totals.slack is None else NOTHING
    share = 100.0 * totals.slack / (totals.owned * size)
    if used < limits.slack_use_percent or share < limits.slack_percent / 2:
        return NOTHING
    filled = token_use_percent(engine.engine, engine.engine.pools[0])
    if filled is None:
        return None
    return (
        Candidate(
            summary=f"{used:.0f} % of the blocks are in use but only about {filled:.0f} % of the "
            f"token slots hold a token. The last block of each request is mostly empty.",
            start=share >= limits.slack_percent,
            evidence={
                "blocks in use": f"{used:.1f} %",
                "token slots filled": f"{filled:.1f} %",
                "empty slots": f"{totals.slack} of {totals.owned * size}",
                "block": f"{size} tokens",
            },
        ),
    )


def never_hit(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """A cache that fills and evicts and is never hit."""
    counts = engine.counts
    if counts is None or counts.usable <= 0:
        return None
    if engine.engine.prefix_caching is False:
        return NOTHING
    width_s = limits.unhit_window_s
    touched = engine.counter_delta("touched", width_s)
    allocated = engine.counter_delta("allocated", width_s)
    evicted = engine.counter_delta("evicted", width_s)
    if touched is None or allocated is None or evicted is None:
        return None
    if engine.counters.span_s(width_s) < 0.9 * width_s:
        return None
    share = 100.0 * counts.cached / counts.usable
    if allocated < limits.unhit_blocks or share < limits.unhit_cached_percent:
        return NOTHING
    if touched > 0.01 * allocated:
        return NOTHING
    return (
        Candidate(
            summary=f"{share:.0f} % of the pool is cached and was hit {touched:.0f} times in "
            f"{duration(width_s)}. The prompts share no prefix, or differ early.",
            evidence={
                "cached": f"{counts.cached} of {counts.usable} blocks",
                "hits": f"{touched:.0f} blocks",
                "allocated": f"{allocated:.0f} blocks",
                "evicted": f"{evicted:.0f} blocks",
            },
        ),
    )


def short_life(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Cached blocks are evicted within seconds although they are hit."""
    counts = engine.counts
    if counts is None:
        return None
    width_s = 30.0
    evicted = engine.counter_delta("evicted", width_s)
    touched = engine.counter_delta("touched", width_s)
    if evicted is None or touched is None or engine.counters.span_s(width_s) < 0.8 * width_s:
        return None
    rate = evicted / engine.counters.span_s(width_s)
    if rate <= 0 or evicted < 100 or touched < 20:
        return NOTHING
    # Little's law: what is inside = what leaves a second x how long it stays.
    life_s = counts.cached / rate
    if life_s > 2 * limits.cache_life_s:
        return NOTHING
    return (
        Candidate(
            summary=f"A cached block lives for about {life_s:.1f} s before it is evicted, and "
            f"{touched:.0f} were hit in {duration(width_s)}. Much that will be asked for again is "
            "thrown away.",
            start=life_s <= limits.cache_life_s,
            evidence={
                "mean life": f"{life_s:.1f} s (cached / evictions a second)",
                "cached": f"{counts.cached} blocks",
                "evicted": f"{rate:.1f} blocks/s",
                "hit": f"{touched / width_s:.1f} blocks/s",
            },
        ),
    )


def skew(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """One data-parallel engine is full while another of the same server is not."""
    mine = engine.kv_used_percent
    peers = [
        other
        for other in track.engines.values()
        if other is not engine
        and other.mono_s == track.mono_s
        and other.engine.server == engine.engine.server
        and other.engine.alive
        and other.engine.engine != engine.engine.engine
    ]
    if not peers:
        return NOTHING
    known = [(other.kv_used_percent, other) for other in peers]
    uses = [(use, other) for use, other in known if use is not None]
    if mine is None or len(uses) != len(peers):
        return None
    low, other = min(uses, key=lambda item: (item[0], item[1].key))
    high = max(use for use, _ in uses)
    if mine < high or mine - low < limits.skew_points / 2:
        return NOTHING
    ranks = {engine.engine.engine: mine} | {o.engine.engine: use for use, o in uses}
    return (
        Candidate(
            summary=f"Engine {engine.engine.engine} uses {mine:.0f} % of its KV blocks while "
            f"engine {other.engine.engine} of the same server uses {low:.0f} %. "
            "The load is spread unevenly.",
            start=mine - low >= limits.skew_points,
            evidence={
                f"engine {rank}": f"{use:.1f} % used"
                for rank, use in sorted(ranks.items(), key=lambda item: str(item[0]))
            },
        ),
    )


RULES = (
    Rule(
        name="efficiency.hit-rate-fallen",
        severity="warning",
        title="The prefix hit rate fell below its own baseline",
        explanation="The rate of the last minute is far below the median of the minutes before, on "
        "the same engine. A changed prompt template, a new tenant, or a cache that is too small "
        "for the present mix does that.",
        starts="{hit_fall_points} below the baseline and under {hit_fall_share} of it for {hit_s}; "
        "the baseline needs {hit_baseline_s}",
        clears="within half of that for {clear_s}",
        next_step="Compare the prompts of now and before: does the shared part still come first?",
        disproof="The traffic of now has no prefix in common with that of before.",
        needs="metrics",
        thresholds=("hit_fall_points", "hit_fall_share", "hit_baseline_s", "hit_s"),
        for_s="hit_s",
        engine=hit_rate_fallen,
    ),
    Rule(
        name="efficiency.short-prompts",
        severity="info",
        title="Prompts shorter than a block: no hits, and rightly",
        explanation="vLLM caches full blocks only. A prompt shorter than a block can never hit.",
        starts="{short_share} of at least {short_prompts} prompts are shorter than a block and "
        "there are no hits",
        clears="longer prompts or hits for {clear_s}",
        next_step="Nothing; a smaller --block-size would make more of them cacheable.",
        disproof="Prompts longer than a block also get no hits.",
        needs="probe",
        thresholds=("short_prompts", "short_share"),
        engine=short_prompts,
    ),
    Rule(
        name="efficiency.tail-slack",
        severity="info",
        title="Much of the blocks in use is empty",
        explanation="A request's last block is filled token by token. With large blocks and short "
        "requests the empty part weighs: use in blocks says more than use in tokens.",
        starts="{slack_percent} of the slots empty and pool use above {slack_use_percent} for "
        "{slack_s}",
        clears="less than half of that for {clear_s}",
        next_step="A smaller --block-size wastes less, where the attention kernel allows it.",
        disproof="The requests grow and fill their blocks.",
        needs="probe",
        thresholds=("slack_percent", "slack_use_percent", "slack_s"),
        for_s="slack_s",
        engine=slack,
    ),
    Rule(
        name="efficiency.never-hit",
        severity="info",
        title="The prefix cache is filled and never hit",
        explanation="Blocks are cached and evicted and none is asked for again. It costs little, "
        "since cached blocks are free for the taking.",
        starts="{unhit_cached_percent} of the pool cached, {unhit_blocks} allocated and under 1 % "
        "hit in {unhit_window_s}",
        clears="hits come for {clear_s}",
        next_step="If prompts should share a prefix: put the shared part first, byte for byte.",
        disproof="The prompts of this traffic have nothing in common.",
        needs="probe",
        thresholds=("unhit_window_s", "unhit_blocks", "unhit_cached_percent"),
        engine=never_hit,
    ),
    Rule(
        name="efficiency.short-cache-life",
        severity="info",
        title="Cached blocks are evicted within seconds",
        explanation="The mean life of a cached block is what is cached divided by what is evicted "
        "a second. When it is seconds, and blocks are hit, others are thrown away that would have "
        "been hit a little later.",
        starts="mean life below {cache_life_s} with hits, for {cache_life_for_s}",
        clears="above twice that for {clear_s}",
        next_step="More KV memory, or routing by prefix, so that the same prefixes meet the same "
        "engine.",
        disproof="The hit rate does not rise with a larger pool.",
        needs="probe",
        thresholds=("cache_life_s", "cache_life_for_s"),
        for_s="cache_life_for_s",
        engine=short_life,
    ),
    Rule(
        name="efficiency.engine-skew",
        severity="info",
        title="Data-parallel engines are loaded unevenly",
        explanation="Engines of one server have pools of their own. Requests on a full one wait "
        "while another has room.",
        starts="pool use {skew_points} apart for {skew_s}",
        clears="less than half of that for {clear_s}",
        next_step="Look at how requests are spread: sticky routing, few long requests, a rank that "
        "was restarted.",
        disproof="Few requests: with three requests on two engines some skew is natural.",
        needs="probe or metrics, two engines of one server",
        thresholds=("skew_points", "skew_s"),
        for_s="skew_s",
        engine=skew,
    ),
)
