"""NVML through the real pynvml, against a library of scripted GPUs."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtop.sources.lane import Lane, StuckError
from kvtop.sources.nvml_errors import device_error, driver_error
from kvtop.sources.nvml_process import command, system_memory

STUBS = Path(__file__).parent.parent / "stubs"
ROOT = STUBS.parent.parent
PATIENCE_S = 60
"""A child that does not answer for this long has hung."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc, clang) to build the NVML stub with")
    folder = tmp_path_factory.mktemp("nvml")
    output = ["-o", str(folder / "libnvidia-ml.so.1"), str(STUBS / "nvml_stub.c")]
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", "-D_DEFAULT_SOURCE"]
    subprocess.run([compiler, *flags, *output], check=True)
    return folder


class Machine:
    """A child process that reads the scripted machine."""

    def __init__(self, folder: Path, library: Path | None, options: dict[str, Any]) -> None:
        self.script = folder / "script"
        self.log = folder / "log"
        self.settings: dict[str, object] = {}
        self.process: subprocess.Popen[str] | None = None
        self.library = library
        self.options = options

    def set(self, **settings: object) -> None:
        """Change the machine; `__` in a name stands for a dot, a leading `g` for a GPU."""
        for key, value in settings.items():
            name = key.replace("__", ".")
            if name[0] == "g" and name[1].isdigit():
                name = name[1:]
            self.settings[name] = value
        text = "".join(f"{k}={v}\n" for k, v in self.settings.items() if v is not None)
        new = self.script.with_suffix(".new")
        new.write_text(text)
        new.rename(self.script)

    def read(self, time_s: float = 0.0) -> dict[str, Any]:
        if self.process is None:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "NVML_STUB": str(self.script)}
            environment["NVML_STUB_LOG"] = str(self.log)
            # An empty folder hides no driver of this machine, a stub does.
            environment["LD_LIBRARY_PATH"] = str(self.library or self.script.parent)
            self.process = subprocess.Popen(
                [sys.executable, str(STUBS / "nvml_child.py"), json.dumps(self.options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        killer = threading.Timer(PATIENCE_S, self.process.kill)
        killer.start()
        try:
            self.process.stdin.write(f"{time_s}\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            killer.cancel()
        assert line, "the child died or hung"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def gpus(self, time_s: float = 0.0) -> list[dict[str, Any]]:
        answer = self.read(time_s)
        assert "gpus" in answer, answer
        gpus: list[dict[str, Any]] = answer["gpus"]
        return gpus

    def end(self) -> int:
        """Exit code of the child once its input ends."""
        if self.process is None:
            return 0
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


Make = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path, library: Path) -> Iterator[Make]:
    made: list[Machine] = []

    def make(**options: Any) -> Machine:
        options = {"gpu_deadline_s": 30.0, "start_deadline_s": 30.0, **options}
        made.append(Machine(tmp_path, library, options))
        made[-1].set(count=2)
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_two_healthy_gpus(machine: Make) -> None:
    box = machine()
    box.set(
        g0__name="NVIDIA H100 80GB HBM3", g0__total=85899345920, g0__reserved=599785472,
        g0__free=12000000000, g0__compute=f"{os.getpid()}:71000000000,999999999:5",
    )  # fmt: skip
    first, second = box.gpus()
    processes = first.pop("processes")
    assert first == {
        "index": 0, "uuid": "GPU-stub-0", "name": "NVIDIA H100 80GB HBM3",
        "mem_total_bytes": 85899345920, "mem_used_bytes": 73299560448,
        "mem_reserved_bytes": 599785472, "mem_free_bytes": 12000000000, "mem_is_system": False,
        "util_percent": 57.0, "mem_util_percent": 31.0, "temperature_c": 62.0,
        "power_w": 412.5, "power_limit_w": 700.0, "sm_clock_mhz": 1980, "mem_clock_mhz": 2619,
        "pcie_rx_bytes_s": 50000.0, "pcie_tx_bytes_s": 20000.0,
        "nvlink_rx_bytes_s": None, "nvlink_tx_bytes_s": None,
        "simulated": False, "error": None,
    }  # fmt: skip
    assert [(p["pid"], p["mem_bytes"]) for p in processes] == [
        (os.getpid(), 71000000000),
        (999999999, 5),
    ]
    assert processes[1]["command"] is None
    assert second["name"] == "Stub GPU 1"
    assert second["processes"] == []


def test_nvml_is_started_once(machine: Make) -> None:
    box = machine()
    for tick in range(5):
        box.gpus(tick)
    assert box.log.read_text() == "I"


def test_process_memory_that_is_not_told_is_none(machine: Make) -> None:
    box = machine()
    box.set(g0__compute="10:-1,11:7", g0__graphics="11:7,12:3")
    processes = box.gpus()[0]["processes"]
    assert [(p["pid"], p["mem_bytes"]) for p in processes] == [(10, None), (11, 7), (12, 3)]


def test_mig_instances_of_one_process_add_up(machine: Make) -> None:
    box = machine()
    box.set(g0__compute="10:5:1:0,10:6:2:0,11:5:1:0,11:-1:2:0")
    processes = box.gpus()[0]["processes"]
    assert [(p["pid"], p["mem_bytes"]) for p in processes] == [(10, 11), (11, None)]


def test_processes_that_may_not_be_read_are_none(machine: Make) -> None:
    box = machine()
    box.set(
        g0__nvmlDeviceGetComputeRunningProcesses_v3=4,
        g0__nvmlDeviceGetGraphicsRunningProcesses_v3=3,
    )
    first, second = box.gpus()
    assert first["processes"] is None
    assert first["util_percent"] == 57
    assert second["processes"] == []


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("nvmlDeviceGetUtilizationRates", ["util_percent", "mem_util_percent"]),
        ("nvmlDeviceGetTemperature", ["temperature_c"]),
        ("nvmlDeviceGetPowerUsage", ["power_w"]),
        ("nvmlDeviceGetEnforcedPowerLimit", ["power_limit_w"]),
        ("nvmlDeviceGetClockInfo", ["sm_clock_mhz", "mem_clock_mhz"]),
        ("nvmlDeviceGetPcieThroughput", ["pcie_rx_bytes_s", "pcie_tx_bytes_s"]),
        ("nvmlDeviceGetName", ["name"]),
        ("nvmlDeviceGetUUID", ["uuid"]),
    ],
)
@pytest.mark.parametrize("code", [3, 4, 13, 999])
def test_one_missing_fact_takes_nothing_else_with_it(
    machine: Make, function: str, fields: list[str], code: int
) -> None:
    box = machine()
    box.set(**{f"g0__{function}": code})
    first, second = box.gpus()
    nvlink = ["nvlink_rx_bytes_s", "nvlink_tx_bytes_s"]
    missing = {key for key, value in first.items() if value is None} - {"error", *nvlink}
    assert missing == set(fields)
    assert first["error"] is None
    assert second["error"] is None


def test_without_reserved_memory_the_older_figures_are_used(machine: Make) -> None:
    box = machine()
    box.set(g0__nvmlDeviceGetMemoryInfo_v2=13)
    first = box.gpus()[0]
    assert (first["mem_total_bytes"], first["mem_used_bytes"], first["mem_free_bytes"]) == (
        1000, 700, 300,
    )  # fmt: skip
    assert first["mem_reserved_bytes"] is None
    assert first["mem_is_system"] is False


def test_unified_memory_shows_the_systems(machine: Make) -> None:
    box = machine()
    box.set(
        count=1, g0__name="NVIDIA GB10", g0__compute="10:5",
        g0__nvmlDeviceGetMemoryInfo=3, g0__nvmlDeviceGetMemoryInfo_v2=3,
    )  # fmt: skip
    (gpu,) = box.gpus()
    memory = system_memory()
    assert memory is not None
    assert gpu["mem_is_system"] is True
    assert gpu["mem_total_bytes"] == memory[0]
    assert gpu["mem_used_bytes"] + gpu["mem_free_bytes"] == memory[0]
    assert gpu["mem_reserved_bytes"] is None
    assert gpu["processes"][0]["mem_bytes"] == 5
    assert gpu["error"] is None


@pytest.mark.parametrize("code", [3, 4])
def test_a_mig_parent_shows_no_memory_of_the_system(machine: Make, code: int) -> None:
    box = machine()
    box.set(
        g0__mig=1, g0__nvmlDeviceGetMemoryInfo=code, g0__nvmlDeviceGetMemoryInfo_v2=code,
        g0__nvmlDeviceGetUtilizationRates=3,
    )  # fmt: skip
    first, second = box.gpus()
    assert first["mem_total_bytes"] is None
    assert first["mem_is_system"] is False
    assert first["util_percent"] is None
    assert first["temperature_c"] == 62
    assert first["error"] is None
    assert second["util_percent"] == 57


def test_a_lost_gpu_hides_no_other_and_comes_back(machine: Make) -> None:
    box = machine()
    assert box.gpus(0)[1]["error"] is None
    box.set(g1__nvmlDeviceGetMemoryInfo_v2=15)
    first, second = box.gpus(100)
    assert first["error"] is None
    assert first["util_percent"] == 57
    assert second["error"].startswith("lost:")
    assert second["name"] == "Stub GPU 1"
    assert second["util_percent"] is None
    box.set(g1__nvmlDeviceGetMemoryInfo_v2=0)
    assert box.gpus(101)[1]["error"] is None
    assert box.log.read_text() == "ISI"


def test_a_gpu_that_stays_lost_is_tried_again_but_not_at_each_read(machine: Make) -> None:
    box = machine()
    box.set(g1__nvmlDeviceGetHandleByIndex=15)
    for tick in range(65):
        first, second = box.gpus(tick)
        assert first["util_percent"] == 57
        assert second["error"].startswith("lost:")
    assert box.log.read_text() == "ISISI"


def test_a_gpu_without_permission_says_so_and_nvml_is_left_alone(machine: Make) -> None:
    box = machine()
    box.set(g1__nvmlDeviceGetHandleByIndex=4)
    for tick in (0, 100, 200):
        assert box.gpus(tick)[1]["error"] == "no permission to read it"
    assert box.log.read_text() == "I"


def test_a_gpu_on_which_everything_fails_says_why(machine: Make) -> None:
    box = machine()
    every = ("MemoryInfo", "MemoryInfo_v2", "UtilizationRates", "Temperature", "PowerUsage")
    box.set(**{f"g0__nvmlDeviceGet{name}": 999 for name in every})
    first, second = box.gpus()
    assert "unknown error" in first["error"]
    assert second["error"] is None


def test_a_hung_gpu_hides_no_other_recovers_and_does_not_hold_the_exit(machine: Make) -> None:
    box = machine(gpu_deadline_s=1.5)
    box.gpus(0)
    box.set(g0__nvmlDeviceGetPowerUsage__hang=1)
    box.read(10)
    first, second = box.gpus(17)
    assert first["error"] == "no answer for 7 s"
    assert first["name"] == "Stub GPU 0"
    assert second["power_w"] == 412.5
    box.set(g0__nvmlDeviceGetPowerUsage__hang=None)
    for tick in range(100):
        if box.gpus(20 + tick)[0]["error"] is None:
            break
        threading.Event().wait(0.02)
    assert box.gpus(200)[0]["power_w"] == 412.5
    assert box.log.read_text() == "I"
    box.set(g0__nvmlDeviceGetPowerUsage__hang=1)
    box.read(300)
    assert box.end() == 0


def test_nvml_that_hangs_while_starting(machine: Make) -> None:
    box = machine(start_deadline_s=0.5)
    box.set(init__hang=1)
    box.read(10)
    answer = box.read(15)
    assert answer["reason"] == "the NVIDIA driver has not answered for 5 s"
    box.set(init__hang=None)
    for tick in range(200):
        if "gpus" in box.read(16 + tick):
            break
        threading.Event().wait(0.02)
    assert box.gpus(300)[0]["util_percent"] == 57
    assert box.log.read_text() == "I"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (9, "the NVIDIA driver is not loaded"),
        (18, "the NVIDIA library and the kernel driver are of different versions"),
        (4, "no permission to use the NVIDIA driver"),
        (15, "a GPU is lost and keeps NVML from starting"),
        (999, "NVML does not start: Unknown Error (999)"),
    ],
)
def test_nvml_that_does_not_start_says_why_and_is_tried_again(
    machine: Make, code: int, reason: str
) -> None:
    box = machine()
    box.set(init=code)
    answer = box.read(0)
    assert answer["reason"] == reason
    assert answer["remedy"]
    box.set(init=0)
    assert len(box.gpus(1)) == 2


def test_no_gpu_then_one(machine: Make) -> None:
    box = machine()
    box.set(count=0)
    assert box.read(0)["reason"] == "the NVIDIA driver is here but shows no GPU"
    box.set(count=1)
    assert len(box.gpus(1)) == 1
    assert box.log.read_text() == "ISI"


def test_no_library(tmp_path: Path) -> None:
    # A file that is no library, found first: as good as none, also on a machine with a driver.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    box = Machine(tmp_path, None, {"start_deadline_s": 30.0})
    box.set(count=1)
    try:
        answer = box.read()
        assert answer["reason"] == "no NVIDIA driver here: libnvidia-ml.so.1 cannot be loaded"
        assert "container" in answer["remedy"]
    finally:
        box.end()


def test_nvlink_rates_come_from_two_readings(machine: Make) -> None:
    box = machine()
    box.set(count=1, g0__nvlink=0, g0__nvlink_rx=1000, g0__nvlink_tx=500)
    assert box.gpus(10)[0]["nvlink_rx_bytes_s"] is None
    box.set(g0__nvlink_rx=3000, g0__nvlink_tx=500)
    gpu = box.gpus(12)[0]
    assert gpu["nvlink_rx_bytes_s"] == 1000 * 1024
    assert gpu["nvlink_tx_bytes_s"] == 0
    box.set(g0__nvlink_rx=10)
    gpu = box.gpus(13)[0]
    assert gpu["nvlink_rx_bytes_s"] is None
    assert gpu["nvlink_tx_bytes_s"] == 0


def test_pcie_is_measured_every_second_time(machine: Make) -> None:
    box = machine()
    box.set(count=1, g0__pcie_rx=1)
    seen = []
    for tick in range(5):
        box.set(g0__pcie_rx=tick + 1)
        seen.append(box.gpus(tick)[0]["pcie_rx_bytes_s"])
    assert seen == [1000, 1000, 3000, 3000, 5000]


async def test_a_lane_runs_nothing_beside_a_hung_call() -> None:
    now = [0.0]
    lane = Lane("test", lambda: now[0])
    release = threading.Event()
    ran: list[int] = []
    with pytest.raises(StuckError):
        await lane.call(lambda: release.wait(PATIENCE_S), 0.01)
    now[0] = 9.0
    with pytest.raises(StuckError, match="no answer for 9 s"):
        await lane.call(lambda: ran.append(1), 5.0)
    release.set()
    while lane.busy:
        await asyncio.sleep(0.005)
    await lane.call(lambda: ran.append(2), 30.0)
    assert ran == [2]
    lane.end()


async def test_a_lane_passes_errors_on_and_is_free_at_once() -> None:
    lane = Lane("test")
    for _ in range(50):
        with pytest.raises(ZeroDivisionError):
            await lane.call(lambda: 1 / 0, 30.0)
    lane.end()


def test_every_code_has_one_plain_line() -> None:
    for code in range(1, 40):
        for text in (driver_error(code, "x\ny").reason, device_error(code, "x\ny")):
            assert text.isprintable()
            assert 5 < len(text) < 100


def proc(folder: Path, pid: int, cmdline: bytes, *, gpu: bool) -> Path:
    base = folder / str(pid)
    (base / "fd").mkdir(parents=True)
    (base / "cmdline").write_bytes(cmdline)
    (base / "comm").write_bytes(b"short\n")
    (base / "fd/3").symlink_to("/dev/nvidia0" if gpu else "/dev/null")
    return folder


def test_command_is_shortened_and_harmless(tmp_path: Path) -> None:
    root = proc(tmp_path, 5, b"python3\0-m\0vllm\x1b[2J\0" + b"x" * 5000, gpu=False)
    text = command(5, host_pids=True, proc=root)
    assert text is not None
    assert text.startswith("python3 -m vllm [2J x")
    assert len(text) == 120
    assert command(6, host_pids=True, proc=root) is None


def test_command_falls_back_to_the_short_name(tmp_path: Path) -> None:
    assert command(5, host_pids=True, proc=proc(tmp_path, 5, b"", gpu=False)) == "short"


def test_in_a_container_only_a_process_that_uses_a_gpu_is_named(tmp_path: Path) -> None:
    proc(tmp_path, 5, b"sshd\0", gpu=False)
    proc(tmp_path, 6, b"vllm\0", gpu=True)
    assert command(5, host_pids=False, proc=tmp_path) is None
    assert command(6, host_pids=False, proc=tmp_path) == "vllm"


def test_system_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 5 kB\nMemAvailable: 40 kB\n")
    assert system_memory(tmp_path) == (102400, 40960)
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\n")
    assert system_memory(tmp_path) is None
