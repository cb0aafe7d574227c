from __future__ import annotations

from dataclasses import replace

from kvtop.draw.gpu import gpu_panel, kv_on_gpu, title
from kvtop.draw.view import View
from kvtop.model.snapshot import GpuProcess, SourceState
from tests.draw import samples
from tests.draw.golden import styles_of, text_of

EACH = samples.ENGINE.block_bytes or 0


def test_the_split_is_counts_times_bytes() -> None:
    share = kv_on_gpu(samples.HEALTHY, View(), samples.GPU)
    assert share is not None
    assert share.total == 2000 * EACH
    assert share.used == (37 + 629 + 8) * EACH
    assert share.cached == 400 * EACH
    assert share.free == 925 * EACH


def test_a_pool_over_two_gpus_is_divided() -> None:
    other = replace(samples.GPU, index=1)
    snap = replace(samples.HEALTHY, gpus=(samples.GPU, other))
    share = kv_on_gpu(snap, View(), other)
    assert share is not None
    assert share.total == 1000 * EACH


def test_two_engines_on_one_gpu_add_up() -> None:
    second = replace(samples.ENGINE, pid=5000)
    gpu = replace(
        samples.GPU, processes=(*samples.GPU.processes, GpuProcess(5001, "w", None, 5000))
    )
    snap = replace(samples.HEALTHY, engines=(samples.ENGINE, second), gpus=(gpu,))
    share = kv_on_gpu(snap, View(), gpu)
    assert share is not None
    assert share.total == 4000 * EACH


def test_no_split_is_invented() -> None:
    stranger = replace(samples.GPU, processes=(GpuProcess(99, "python train.py", 1, None),))
    small = replace(samples.GPU, mem_used_bytes=1 << 20)
    no_bytes = samples.with_engine(block_bytes=None)
    for snap, gpu, reason in (
        (replace(samples.HEALTHY, gpus=(stranger,)), stranger, "no engine known here"),
        (replace(samples.HEALTHY, gpus=(small,)), small, "KV bytes not known"),
        (no_bytes, samples.GPU, "KV bytes not known"),
        (samples.NO_PROBE, samples.GPU, "no probe"),
    ):
        assert kv_on_gpu(snap, View(), gpu) is None
        assert reason in text_of(gpu_panel(snap, View(), 60, 6)[1])


def test_hidden_owners_count_only_one_to_one() -> None:
    hidden = replace(samples.GPU, processes=(GpuProcess(7, None, None, None),))
    one = replace(samples.HEALTHY, gpus=(hidden,))
    assert kv_on_gpu(one, View(), hidden) is not None
    two = replace(one, engines=(samples.ENGINE, replace(samples.ENGINE, pid=1)))
    assert kv_on_gpu(two, View(), hidden) is None


def test_the_bar_is_as_long_as_the_use() -> None:
    full = replace(samples.GPU, mem_used_bytes=samples.GPU.mem_total_bytes)
    lines = gpu_panel(replace(samples.HEALTHY, gpus=(full,)), View(ascii=True), 160, 1)
    bar = text_of(lines[0])[4:-10]
    assert set(bar.strip()) == {"w", "U", "c", "."}
    assert " " not in bar.strip()


def test_old_figures_are_grey_with_their_age() -> None:
    snap = samples.with_source(
        "nvml", state=SourceState.FAILED, reason="call hangs", value_time_s=samples.NOW - 8
    )
    lines = gpu_panel(snap, samples.VIEW, 60, 5)
    assert text_of(lines[0]).startswith("FAILED values 8.0s old: call hangs")
    assert styles_of(lines[1]) == {"dim"}


def test_a_simulated_gpu_says_so() -> None:
    snap = replace(samples.HEALTHY, gpus=(replace(samples.GPU, simulated=True),))
    assert title(snap, View(), 40) == "GPU 0 SIMULATED H100 80GB"
    assert title(snap, View(), 16) == "GPU 0 SIMULATED"


def test_more_gpus_than_lines_are_counted() -> None:
    gpus = tuple(replace(samples.GPU, index=number) for number in range(8))
    lines = gpu_panel(replace(samples.HEALTHY, gpus=gpus), View(), 60, 9)
    assert text_of(lines[-1]).strip() == "5 more GPUs"
