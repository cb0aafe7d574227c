"""Figures of GPUs that do not exist, consistent with what the simulated engine does.

Memory is what vLLM would hold: weights, the whole reserved KV cache, context and graphs;
it does not move with the load. Utilization, power and temperature follow the steps.
"""

from __future__ import annotations

import math
import os

from kvtop.demo.config import (
    GPU_TOTAL_BYTES,
    MIB,
    OTHER_BYTES,
    WEIGHT_BYTES,
    VllmConfig,
    kv_bytes,
    kv_cache_config,
)
from kvtop.model.snapshot import Gpu, GpuProcess

_RESERVED_BYTES = 553 * MIB
_LIMIT_W = 700.0
_IDLE_W = 118.0
_UTIL_S = 1.0
"""Time constant of the utilization NVML averages over."""
_HEAT_S = 25.0
"""Time constant of the temperature."""


class GpuModel:
    """The GPUs of one simulated engine; all do the same.

    Args:
        config: Blocks and number of GPUs.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._count = config.parallel_config.tensor_parallel_size
        cache = kv_bytes(kv_cache_config(config.cache_config.num_gpu_blocks, self._count))
        self._used = WEIGHT_BYTES // self._count + cache + OTHER_BYTES
        # (simulated time, busy share, memory share, heat share), replaced as a whole: the
        # HTTP thread reads it without a lock.
        self._state = (0.0, 0.0, 0.0, 0.0)

    def observe(self, start_s: float, end_s: float, prefill_share: float) -> None:
        """A step has run.

        Args:
            start_s: When, simulated seconds.
            end_s: Its end.
            prefill_share: Share of prefill in its work, 0-1: that is bound by compute, the
                rest by memory.
        """
        _, busy, memory, heat = self._faded(start_s)
        new, warm = _weight(end_s - start_s, _UTIL_S), _weight(end_s - start_s, _HEAT_S)
        power = 0.62 + 0.33 * prefill_share
        self._state = (
            end_s,
            busy + new * (1.0 - busy),
            memory + new * (0.75 - 0.45 * prefill_share - memory),
            heat + warm * (power - heat),
        )

    def _faded(self, now_s: float) -> tuple[float, float, float, float]:
        then_s, busy, memory, heat = self._state
        gap = max(0.0, now_s - then_s)
        keep, warm = 1.0 - _weight(gap, _UTIL_S), 1.0 - _weight(gap, _HEAT_S)
        return now_s, busy * keep, memory * keep, heat * warm

    def read(self, now_s: float) -> list[Gpu]:
        """What NVML would say.

        Args:
            now_s: Simulated time.
        """
        _, busy, memory, heat = self._faded(now_s)
        power = _IDLE_W + (_LIMIT_W - _IDLE_W) * busy * (0.55 + 0.4 * heat)
        link = 310e9 * busy if self._count > 1 else None
        return [
            Gpu(
                index=index,
                uuid=f"GPU-demo-{index:04d}",
                name="NVIDIA H100 80GB HBM3",
                mem_total_bytes=GPU_TOTAL_BYTES,
                mem_used_bytes=self._used,
                mem_reserved_bytes=_RESERVED_BYTES,
                mem_free_bytes=GPU_TOTAL_BYTES - self._used - _RESERVED_BYTES,
                util_percent=float(round(100 * busy)),
                mem_util_percent=float(round(100 * memory)),
                temperature_c=float(round(34 + 45 * heat)),
                power_w=round(power, 1),
                power_limit_w=_LIMIT_W,
                sm_clock_mhz=1980 if busy > 0.02 else 345,
                mem_clock_mhz=2619,
                pcie_rx_bytes_s=round(2e6 + 90e6 * busy),
                pcie_tx_bytes_s=round(1e6 + 25e6 * busy),
                nvlink_rx_bytes_s=link,
                nvlink_tx_bytes_s=link,
                processes=(GpuProcess(os.getpid(), "kvtop demo engine", self._used, os.getpid()),),
                simulated=True,
            )
            for index in range(self._count)
        ]


def _weight(seconds: float, constant_s: float) -> float:
    return 1.0 - math.exp(-max(0.0, seconds) / constant_s)
