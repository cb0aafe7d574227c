"""All GPUs of this machine, through NVML.

NVML's calls block, and on a GPU that hangs they block for ever. So each GPU has a thread
of its own: a hung one is a line that says so, and the others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from kvtop.model.snapshot import Gpu
from kvtop.sources.base import SourceError
from kvtop.sources.lane import Lane, StuckError
from kvtop.sources.nvml_device import Device
from kvtop.sources.nvml_errors import NO_GPU, NO_PACKAGE, UNKNOWN, driver_error

MAX_GPUS = 256
"""More than any machine has; a wrong count must not start threads without end."""


class _Session:
    """NVML initialised, and the GPUs it showed then."""

    def __init__(self, nvml: Any, devices: list[Device]) -> None:
        self.nvml = nvml
        self.devices = devices


class NvmlSource:
    """Reads all GPUs.

    NVML is initialised once, and again only after it failed or a GPU was lost.

    Args:
        gpu_deadline_s: How long one GPU may take; after it the GPU is shown as hung.
        start_deadline_s: How long one read waits for NVML to start. It goes on starting
            after that: on a machine with eight GPUs and no persistence mode it takes long.
        restart_every_s: Pause between two attempts to get a lost GPU back.
        monotonic: Clock, seconds.
    """

    name = "nvml"
    kind = "nvml"
    period_s = 1.0
    target_pid: int | None = None

    def __init__(
        self,
        *,
        gpu_deadline_s: float = 2.0,
        start_deadline_s: float = 4.0,
        restart_every_s: float = 30.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deadline_s = gpu_deadline_s + start_deadline_s + 2.0
        self._gpu_deadline_s = gpu_deadline_s
        self._start_deadline_s = start_deadline_s
        self._restart_every_s = restart_every_s
        self._monotonic = monotonic
        self._control = Lane("kvtop-nvml", monotonic)
        self._lanes: list[Lane] = []
        # Set in the control thread, also when it comes too late for the read that asked.
        self._session: _Session | None = None
        self._tried_s: float | None = None

    async def read(self) -> tuple[Gpu, ...]:
        """Read all GPUs once, each as far as it answers.

        Raises:
            SourceError: NVML does not start, or shows no GPU.
        """
        session = self._session
        if session is None or self._should_restart(session):
            self._tried_s = self._monotonic()
            try:
                await self._control.call(self._start, self._start_deadline_s)
            except StuckError as stuck:
                if self._session is None:
                    raise SourceError(
                        f"the NVIDIA driver has not answered for {stuck.seconds:.0f} s",
                        "it may still be starting; if it stays so, look for Xid lines in dmesg",
                    ) from None
            session = self._session
            if session is None:
                raise SourceError("NVML is starting", "it is asked again by itself")
        while len(self._lanes) < len(session.devices):
            self._lanes.append(Lane(f"kvtop-gpu-{len(self._lanes)}", self._monotonic))
        return tuple(await asyncio.gather(*(self._read_one(d) for d in session.devices)))

    async def close(self) -> None:
        """Let the threads end. Does not wait for them."""
        for lane in (self._control, *self._lanes):
            lane.end()

    async def _read_one(self, device: Device) -> Gpu:
        try:
            return await self._lanes[device.index].call(device.read, self._gpu_deadline_s)
        except StuckError as stuck:
            error = str(stuck)
        except Exception as fault:
            error = f"kvtop failed while reading it: {type(fault).__name__}"
        return Gpu(index=device.index, uuid=device.uuid, name=device.name, error=error)

    def _should_restart(self, session: _Session) -> bool:
        """Whether to start NVML anew: never while a call is inside it."""
        if not any(device.needs_restart for device in session.devices):
            return False
        if self._control.busy or any(lane.busy for lane in self._lanes):
            return False
        tried_s = self._tried_s
        return tried_s is None or self._monotonic() - tried_s >= self._restart_every_s

    def _start(self) -> None:
        """Initialise NVML and count the GPUs. Runs in the control thread.

        Raises:
            SourceError: It does not start, or there is no GPU.
        """
        try:
            import pynvml
        except ImportError:
            raise NO_PACKAGE from None
        old, self._session = self._session, None
        nvml: Any = pynvml
        try:
            if old is not None:
                _shutdown(nvml)
            nvml.nvmlInit()
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            raise driver_error(int(getattr(error, "value", UNKNOWN)), str(error)) from error
        if count <= 0:
            _shutdown(nvml)
            raise NO_GPU
        devices = [Device(nvml, index, self._monotonic) for index in range(min(count, MAX_GPUS))]
        self._session = _Session(nvml, devices)


def _shutdown(nvml: Any) -> None:
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        # Only the count of initialisations is at stake; the next one tells what is wrong.
        return
