"""What is remembered of one GPU."""

from __future__ import annotations

from collections import deque

from kvtop.model.snapshot import Gpu

_KEEP_S = 120.0
_MOST = 600


class GpuTrack:
    """The last two minutes of one GPU.

    Args:
        index: NVML index.
        mono_s: Monotonic time of the first snapshot with it.
    """

    def __init__(self, index: int, mono_s: float) -> None:
        self.index = index
        self.gpu = Gpu(index=index)
        self.mono_s = mono_s
        self.fresh = False
        """Whether the newest reading can be used."""
        self.was_readable = False
        """Whether it could be read before."""
        self._used: deque[tuple[float, int]] = deque(maxlen=_MOST)

    def append(self, gpu: Gpu, *, mono_s: float, dt_s: float | None, fresh: bool) -> None:
        """Take one reading."""
        self.gpu = gpu
        self.mono_s = mono_s
        self.fresh = fresh
        if dt_s is None or not fresh or gpu.mem_used_bytes is None or gpu.error:
            self._used.clear()
        if fresh and gpu.mem_used_bytes is not None and not gpu.error:
            self.was_readable = True
            if not self._used or mono_s - self._used[-1][0] >= 0.2:
                self._used.append((mono_s, gpu.mem_used_bytes))
            while self._used and mono_s - self._used[0][0] > _KEEP_S:
                self._used.popleft()

    @property
    def used_percent(self) -> float | None:
        """Memory in use, share of the device, 0-100. None: not known now."""
        gpu = self.gpu
        if not self.fresh or gpu.error or gpu.mem_used_bytes is None or not gpu.mem_total_bytes:
            return None
        return 100.0 * gpu.mem_used_bytes / gpu.mem_total_bytes

    def last(self, width_s: float) -> list[tuple[float, int]] | None:
        """Readings of the last `width_s` seconds. None: they do not reach back so far."""
        if not self._used or self.mono_s - self._used[0][0] < width_s:
            return None
        start = self.mono_s - width_s - 1e-6
        points = []
        for point in reversed(self._used):
            if point[0] < start:
                break
            points.append(point)
        points.reverse()
        return points
