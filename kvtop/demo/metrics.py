"""The simulated server's /metrics page, with the names, labels and words of vLLM 0.32.

Read from a running vLLM 0.32 (vllm/v1/metrics/loggers.py). The engine's thread observes,
the HTTP thread renders; one lock keeps each page consistent.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from kvtop.demo.config import VllmConfig, kv_bytes, kv_cache_config

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the page."""

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION = tuple(float(2**n) for n in (0, *range(3, 15)))
_PREEMPTIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def _one_two_five(largest: int) -> tuple[float, ...]:
    out: list[float] = []
    power = 1
    while power <= largest:
        out.extend(float(m * power) for m in (1, 2, 5) if m * power <= largest)
        power *= 10
    return tuple(out)


class Histogram:
    """Counts by upper bound.

    Args:
        bounds: Upper bounds, ascending, without infinity.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


_COUNTERS = {
    "estimated_flops_per_gpu": "Estimated number of floating point operations per GPU (for Model "
    "Flops Utilization calculations).",
    "estimated_read_bytes_per_gpu": "Estimated number of bytes read from memory per GPU (for Model "
    "Flops Utilization calculations).",
    "estimated_write_bytes_per_gpu": "Estimated number of bytes written to memory per GPU (for "
    "Model Flops Utilization calculations).",
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": "External prefix cache queries from KV connector "
    "cross-instance cache sharing, in terms of number of queried tokens.",
    "external_prefix_cache_hits": "External prefix cache hits from KV connector cross-instance "
    "cache sharing, in terms of number of cached tokens.",
    "mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "generation_tokens": "Number of generation tokens processed.",
}

_GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}

_HISTOGRAMS = {
    "iteration_tokens_total": "Histogram of number of tokens per engine_step.",
    "request_prompt_tokens": "Number of prefill tokens processed.",
    "request_generation_tokens": "Number of generation tokens processed.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "request_time_per_output_token_seconds": "Histogram of time_per_output_token_seconds per "
    "request.",
    "e2e_request_latency_seconds": "Histogram of e2e request latency in seconds.",
    "request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
    "request_inference_time_seconds": "Histogram of time spent in RUNNING phase for request.",
    "request_prefill_time_seconds": "Histogram of time spent in PREFILL phase for request.",
    "request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
    "request_num_preemptions": "Histogram of the number of times a request was preempted.",
}

_REASONS = ("stop", "length", "abort", "error", "repetition")
_SLEEP = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}


class Metrics:
    """Everything on the page.

    Args:
        config: For the labels and `cache_config_info`.
    """

    def __init__(self, config: VllmConfig) -> None:
        self.lock = threading.Lock()
        """Held while observing a step and while a page is rendered."""
        self.counters = dict.fromkeys(_COUNTERS, 0.0)
        self.gauges = dict.fromkeys(_GAUGES, 0.0)
        self.waiting_by_reason = {"capacity": 0.0, "deferred": 0.0}
        self.success = dict.fromkeys(_REASONS, 0.0)
        tokens = _one_two_five(config.model_config.max_model_len)
        bounds = {
            "iteration_tokens_total": _ITERATION,
            "request_prompt_tokens": tokens,
            "request_generation_tokens": tokens,
            "request_params_max_tokens": tokens,
            "time_to_first_token_seconds": _TTFT,
            "inter_token_latency_seconds": _ITL,
            "request_time_per_output_token_seconds": _ITL,
            "request_num_preemptions": _PREEMPTIONS,
        }
        self.histograms = {name: Histogram(bounds.get(name, _LATENCY)) for name in _HISTOGRAMS}
        self._started_s = time.time()
        self._labels = {"engine": "0", "model_name": config.model_config.served_model_name}
        cache = config.cache_config
        gpus = config.parallel_config.tensor_parallel_size
        layout = kv_cache_config(cache.num_gpu_blocks, gpus, cache.block_size)
        tokens_held = cache.num_gpu_blocks * cache.block_size
        self._cache_info = {
            "block_size": str(cache.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "engine": "0",
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "kv_cache_max_concurrency": str(
                round(tokens_held / config.model_config.max_model_len, 2)
            ),
            "kv_cache_memory_bytes": str(kv_bytes(layout)),
            "kv_cache_size_tokens": str(tokens_held),
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(cache.num_gpu_blocks),
            "num_gpu_blocks_override": str(cache.num_gpu_blocks),
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": "None",
        }

    def render(self) -> bytes:
        """The page as text, UTF-8."""
        with self.lock:
            return "\n".join(self._lines()).encode() + b"\n"

    def _lines(self) -> Iterable[str]:
        labels = self._labels
        yield from _head("process_start_time_seconds", "gauge", "Start time of the process.")
        yield f"process_start_time_seconds {self._started_s}"
        for name in ("num_requests_running", "num_requests_waiting"):
            yield from _head(f"vllm:{name}", "gauge", _GAUGES[name])
            yield _sample(f"vllm:{name}", labels, self.gauges[name])
        yield from _head(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for "
            "scheduling capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV "
            "transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.",
        )
        for reason, value in self.waiting_by_reason.items():
            yield _sample(
                "vllm:num_requests_waiting_by_reason", {**labels, "reason": reason}, value
            )
        yield from _head(
            "vllm:engine_sleep_state",
            "gauge",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is "
            "awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level "
            "2.",
        )
        for state, value in _SLEEP.items():
            yield _sample("vllm:engine_sleep_state", {**labels, "sleep_state": state}, value)
        name = "vllm:kv_cache_usage_perc"
        yield from _head(name, "gauge", _GAUGES["kv_cache_usage_perc"])
        yield _sample(name, labels, self.gauges["kv_cache_usage_perc"])
        for name, text in _COUNTERS.items():
            yield from _head(f"vllm:{name}_total", "counter", text)
            yield _sample(f"vllm:{name}_total", labels, self.counters[name])
        yield from _head(
            "vllm:request_success_total", "counter", "Count of successfully processed requests."
        )
        for reason, value in self.success.items():
            yield _sample(
                "vllm:request_success_total", {**labels, "finished_reason": reason}, value
            )
        for name, text in _HISTOGRAMS.items():
            yield from self._histogram(f"vllm:{name}", text, self.histograms[name])
        yield from _head(
            "vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig"
        )
        yield _sample("vllm:cache_config_info", self._cache_info, 1.0)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Iterable[str]:
        yield from _head(name, "histogram", text)
        total = 0
        for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
            total += count
            le = "+Inf" if bound is None else str(bound)
            yield _sample(f"{name}_bucket", {**self._labels, "le": le}, float(total))
        yield _sample(f"{name}_count", self._labels, float(total))
        yield _sample(f"{name}_sum", self._labels, histogram.sum)


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
    return f"{name}{{{inside}}} {value}"
