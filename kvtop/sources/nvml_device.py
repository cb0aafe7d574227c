"""One GPU read through pynvml. Everything here blocks; it runs in the GPU's own thread.

What a GPU does not support is None and takes nothing else with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvtop.model.snapshot import Gpu, GpuProcess
from kvtop.sources import nvml_errors as errors
from kvtop.sources.nvml_process import command, in_host_pids, system_memory

T = TypeVar("T")

PCIE_EVERY_S = 2.0
"""NVML measures PCIe over 20 ms and blocks for it, once for each direction, so this is asked
less often and the value stays for as long."""
_SLACK_S = 0.1
_ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVLink field value that means: all links added (nvml.h, `nvmlFieldValue_t`)."""
_NVLINK_TX, _NVLINK_RX = 138, 139
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: KiB since the driver was loaded."""
_PCIE_TX, _PCIE_RX = 0, 1
_CLOCK_SM, _CLOCK_MEM = 1, 2
_SENSOR_GPU = 0
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF


class LostError(Exception):
    """The GPU cannot be read until NVML is started again."""


class Device:
    """One GPU. Not for use from two threads at once.

    Args:
        nvml: The `pynvml` module, initialised.
        index: NVML index.
        monotonic: Clock, seconds.
    """

    def __init__(
        self, nvml: Any, index: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml
        self.index = index
        self.name: str | None = None
        """Product name, once it was read."""
        self.uuid: str | None = None
        """NVML UUID, once it was read."""
        self.needs_restart = False
        """The last reading met an error that only a restart of NVML can end."""
        self._monotonic = monotonic
        self._handle: Any = None
        self._host_pids = in_host_pids()
        self._pcie: tuple[float | None, float | None] = (None, None)
        self._pcie_s: float | None = None
        self._nvlink: dict[int, tuple[float, int]] = {}
        self._trouble: tuple[int, str] | None = None

    def read(self) -> Gpu:
        """Read everything once. A GPU that cannot be read is a `Gpu` with an error."""
        self.needs_restart = False
        self._trouble = None
        try:
            gpu = self._read()
        except LostError:
            return self._failed()
        nothing = (gpu.mem_total_bytes, gpu.util_percent, gpu.temperature_c, gpu.power_w)
        if self._trouble is not None and all(value is None for value in nothing):
            return self._failed()
        return gpu

    def _failed(self) -> Gpu:
        """A line that says why; the next reading starts with a new handle."""
        code, text = self._trouble or (errors.NOT_SUPPORTED, "NVML gives no access to it")
        self.needs_restart = code in errors.RESTART
        self._handle = None
        error = errors.device_error(code, text)
        return Gpu(index=self.index, uuid=self.uuid, name=self.name, error=error)

    def _read(self) -> Gpu:
        nvml = self._nvml
        if self._handle is None:
            self._handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, self.index)
            if self._handle is None:
                raise LostError
        if self.name is None:
            self.name = self._about(nvml.nvmlDeviceGetName)
        if self.uuid is None:
            self.uuid = self._about(nvml.nvmlDeviceGetUUID)
        total, used, reserved, free, is_system = self._memory()
        util = self._about(nvml.nvmlDeviceGetUtilizationRates)
        power = self._about(nvml.nvmlDeviceGetPowerUsage)
        limit = self._about(nvml.nvmlDeviceGetEnforcedPowerLimit)
        temperature = self._about(nvml.nvmlDeviceGetTemperature, _SENSOR_GPU)
        pcie_rx, pcie_tx = self._pcie_rates()
        nvlink_rx, nvlink_tx = self._nvlink_rates()
        return Gpu(
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            mem_total_bytes=total,
            mem_used_bytes=used,
            mem_reserved_bytes=reserved,
            mem_free_bytes=free,
            mem_is_system=is_system,
            util_percent=_percent(util, "gpu"),
            mem_util_percent=_percent(util, "memory"),
            temperature_c=None if temperature is None else float(temperature),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            sm_clock_mhz=self._about(nvml.nvmlDeviceGetClockInfo, _CLOCK_SM),
            mem_clock_mhz=self._about(nvml.nvmlDeviceGetClockInfo, _CLOCK_MEM),
            pcie_rx_bytes_s=pcie_rx,
            pcie_tx_bytes_s=pcie_tx,
            nvlink_rx_bytes_s=nvlink_rx,
            nvlink_tx_bytes_s=nvlink_tx,
            processes=self._processes(),
        )

    def _about(self, call: Callable[..., Any], *args: object) -> Any:
        return self._ask(call, self._handle, *args)

    def _ask(self, call: Callable[..., T], *args: object) -> T | None:
        """Call NVML; None where this GPU or driver does not tell.

        Raises:
            LostError: No further call on this GPU can work.
        """
        try:
            return call(*args)
        except self._nvml.NVMLError as error:
            self._note(error)
            return None
        except (UnicodeDecodeError, self._nvml.NVMLLibraryMismatchError):
            # The second means a function that this driver is too old to have.
            return None

    def _note(self, error: Any) -> None:
        """Remember the error that explains most.

        Raises:
            LostError: No further call on this GPU can work.
        """
        code = int(error.value)
        if code in (errors.NOT_SUPPORTED, errors.FUNCTION_NOT_FOUND):
            return
        if self._trouble is None or code in errors.FATAL:
            self._trouble = (code, str(error))
        if code in errors.FATAL:
            raise LostError from error

    def _memory(self) -> tuple[int | None, int | None, int | None, int | None, bool]:
        """Total, used, reserved, free in bytes, and whether they are the system's."""
        nvml = self._nvml
        info = self._about(nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2)
        if info is not None:
            return int(info.total), int(info.used), int(info.reserved), int(info.free), False
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(self._handle)
            return int(info.total), int(info.used), None, int(info.free), False
        except nvml.NVMLError as error:
            supported = int(error.value) != errors.NOT_SUPPORTED
            self._note(error)
        # Not supported at all: the GPU has no memory of its own (GB10). A MIG parent has.
        system = None if supported or self._is_mig() else system_memory()
        if system is None:
            return None, None, None, None, False
        total, free = system
        return total, total - free, None, free, True

    def _is_mig(self) -> bool:
        mode = self._about(self._nvml.nvmlDeviceGetMigMode)
        return mode is not None and mode[0] == 1

    def _pcie_rates(self) -> tuple[float | None, float | None]:
        """Received and sent, bytes/s (NVML: KB/s over 20 ms)."""
        now = self._monotonic()
        if self._pcie_s is None or now - self._pcie_s >= PCIE_EVERY_S - _SLACK_S:
            call = self._nvml.nvmlDeviceGetPcieThroughput
            rx = self._about(call, _PCIE_RX)
            tx = None if rx is None else self._about(call, _PCIE_TX)
            self._pcie = (
                None if rx is None else rx * 1000.0,
                None if tx is None else tx * 1000.0,
            )
            self._pcie_s = now
        return self._pcie

    def _nvlink_rates(self) -> tuple[float | None, float | None]:
        """Received and sent over all links, bytes/s, from two readings of the counters."""
        fields = [(_NVLINK_RX, _ALL_LINKS), (_NVLINK_TX, _ALL_LINKS)]
        values = self._about(self._nvml.nvmlDeviceGetFieldValues, fields)
        now = self._monotonic()
        rates: list[float | None] = []
        for position, (field, _) in enumerate(fields):
            value = _field_value(values[position]) if values is not None else None
            before = self._nvlink.pop(field, None)
            rate = None
            if value is not None:
                self._nvlink[field] = (now, value)
                if before is not None and value >= before[1] and now > before[0]:
                    rate = (value - before[1]) * 1024 / (now - before[0])
            rates.append(rate)
        return rates[0], rates[1]

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        nvml = self._nvml
        lists = [
            self._about(nvml.nvmlDeviceGetComputeRunningProcesses),
            self._about(nvml.nvmlDeviceGetGraphicsRunningProcesses),
        ]
        if all(entries is None for entries in lists):
            return None
        # One process can be in both lists with the same memory, and on MIG once an instance.
        parts: dict[int, dict[tuple[int, int], int | None]] = {}
        for entries in lists:
            for entry in entries or ():
                place = (int(entry.gpuInstanceId), int(entry.computeInstanceId))
                mem = entry.usedGpuMemory
                known = parts.setdefault(int(entry.pid), {})
                if mem is not None and int(mem) != _NOT_AVAILABLE:
                    known[place] = max(int(mem), known.get(place) or 0)
                else:
                    known.setdefault(place, None)
        return tuple(
            GpuProcess(
                pid=pid,
                command=command(pid, host_pids=self._host_pids),
                mem_bytes=_sum(list(parts[pid].values())),
                engine_pid=None,
            )
            for pid in sorted(parts)
        )


def _sum(values: list[int | None]) -> int | None:
    """The sum, or None where one part is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _percent(rates: Any, part: str) -> float | None:
    """One of the two utilization figures; what is not a percentage is not known."""
    if rates is None:
        return None
    value = float(getattr(rates, part))
    return value if 0 <= value <= 100 else None


def _field_value(value: Any) -> int | None:
    """An unsigned field value, by its own type and status. None: it has none."""
    if int(value.nvmlReturn) != 0:
        return None
    # nvmlValueType_t: 1 unsigned int, 2 unsigned long, 3 unsigned long long.
    part = {1: "uiVal", 2: "ulVal", 3: "ullVal"}.get(int(value.valueType))
    return None if part is None else int(getattr(value.value, part))
