"""How much of the pool holds tokens: blocks in use say more than is stored."""

from __future__ import annotations

from kvtop.model.snapshot import Engine, Pool


def token_use_percent(engine: Engine, pool: Pool) -> float | None:
    """Share of the pool's token slots that hold a token of a request, 0-100.

    Blocks in use, each once however many share it, times their size, less the slots that
    requests say are empty. None: a request does not tell, or the groups have blocks of
    different sizes.
    """
    tokens = engine.block_size
    sizes = {group.block_size_tokens for group in engine.groups}
    if engine.requests is None or not tokens or pool.counts.usable <= 0 or sizes - {tokens}:
        return None
    slack = 0
    for request in engine.requests:
        if request.blocks == 0:
            continue
        if request.slack_tokens is None:
            return None
        slack += request.slack_tokens
    counts = pool.counts
    filled = (counts.used + counts.shared + counts.held) * tokens - slack
    return 100.0 * max(filled, 0) / (counts.usable * tokens)
