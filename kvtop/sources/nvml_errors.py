"""NVML's error codes in plain words.

Codes from `nvml.h` (nvidia-ml-py 13.x, `pynvml.py`); they are part of NVML's stable ABI,
so they stand here as numbers and this module needs no pynvml.
"""

from __future__ import annotations

from kvtop.sources.base import SourceError, one_line

UNINITIALIZED = 1
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
GPU_NOT_FOUND = 28
UNKNOWN = 999

FATAL = frozenset(
    (UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH)
)
"""After one of these no other call on that GPU can work until NVML is started again."""
RESTART = FATAL | {GPU_NOT_FOUND, UNKNOWN}
"""A GPU that cannot be read for one of these may come back when NVML is started again."""

_DRIVER: dict[int, tuple[str, str]] = {
    LIBRARY_NOT_FOUND: (
        "no NVIDIA driver here: libnvidia-ml.so.1 cannot be loaded",
        "install the driver; start a container with access to its GPUs (docker run --gpus all)",
    ),
    DRIVER_NOT_LOADED: (
        "the NVIDIA driver is not loaded",
        "load it (modprobe nvidia), or give the container access to the GPUs",
    ),
    LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA library and the kernel driver are of different versions",
        "reboot or reload the kernel driver, then start kvtop again",
    ),
    NO_PERMISSION: (
        "no permission to use the NVIDIA driver",
        "run kvtop as a user who may open /dev/nvidiactl, or as root",
    ),
    FUNCTION_NOT_FOUND: (
        "the NVIDIA driver is too old for kvtop",
        "update the driver",
    ),
    GPU_IS_LOST: (
        "a GPU is lost and keeps NVML from starting",
        "look for Xid lines in dmesg, then reset the GPU or reboot",
    ),
}

_DEVICE: dict[int, str] = {
    NO_PERMISSION: "no permission to read it",
    GPU_IS_LOST: "lost: it does not answer on the bus; look for Xid lines in dmesg",
    RESET_REQUIRED: "needs a reset; look for Xid lines in dmesg",
    DRIVER_NOT_LOADED: "its driver is not loaded",
    UNINITIALIZED: "NVML was shut down; it is started again by itself",
    LIB_RM_VERSION_MISMATCH: "library and driver are of different versions",
    GPU_NOT_FOUND: "not found; it may have been removed",
    TIMEOUT: "the driver gave up waiting for it",
    UNKNOWN: "the driver reports an unknown error; look for Xid lines in dmesg",
}

NO_GPU = SourceError(
    "the NVIDIA driver is here but shows no GPU",
    "in a container give it GPUs; else look for Xid lines in dmesg",
)
NO_PACKAGE = SourceError(
    "the Python package nvidia-ml-py is not installed", "pip install nvidia-ml-py"
)


def driver_error(code: int, text: str) -> SourceError:
    """Why NVML does not start.

    Args:
        code: NVML's return code.
        text: NVML's own words, used where there are no better ones.
    """
    reason, remedy = _DRIVER.get(
        code, (f"NVML does not start: {one_line(text, 80)} ({code})", "look at dmesg")
    )
    return SourceError(reason, remedy)


def device_error(code: int, text: str) -> str:
    """Why one GPU cannot be read, one plain line.

    Args:
        code: NVML's return code.
        text: NVML's own words, used where there are no better ones.
    """
    return _DEVICE.get(code, f"cannot be read: {one_line(text, 80)} ({code})")
