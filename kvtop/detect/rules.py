"""All rules, in the order in which they are told."""

from __future__ import annotations

from kvtop.detect import (
    efficiency,
    gpu_memory,
    health_rules,
    host_memory,
    leak_rules,
    leak_trends,
    own,
    pressure_rules,
)
from kvtop.detect.rule import Rule

ENGINE_RULES: tuple[Rule, ...] = (
    *leak_rules.RULES,
    *leak_trends.RULES,
    *gpu_memory.ENGINE_RULES,
    *host_memory.RULES,
    *pressure_rules.RULES,
    *efficiency.RULES,
    *health_rules.RULES,
)
"""Rules about one engine."""
GPU_RULES: tuple[Rule, ...] = gpu_memory.GPU_RULES
"""Rules about one GPU."""
ALL_RULES: tuple[Rule, ...] = (*ENGINE_RULES, *GPU_RULES, own.RULE)
"""Every rule."""
BY_NAME: dict[str, Rule] = {rule.name: rule for rule in ALL_RULES}
"""By name."""
