"""What the simulated server was started with: vLLM's configuration objects, in small.

The figures of the model and the GPU are those of Qwen3-8B (its config.json: 36 layers,
8 KV heads of 128 elements, bfloat16) on an H100 80GB HBM3 (81,559 MiB by nvidia-smi).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtop.demo.kv_manager import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from kvtop.errors import UsageError

MODEL = "Qwen/Qwen3-8B"
"""Name of the simulated model."""
VLLM_VERSION = "0.32.0+demo"
"""What the simulated server says when asked for its version."""
BLOCK_SIZE = 16
"""Tokens a block: vLLM's default on CUDA."""
MIN_BLOCKS = 64
"""Fewest blocks of a pool that the demo's traffic can live in."""
MAX_BLOCKS = 200_000
"""Most blocks: what eight 80 GB GPUs hold of this model."""

_LAYERS = 36
_KV_HEADS = 8
_HEAD_SIZE = 128
MIB = 2**20
GPU_TOTAL_BYTES = 81_559 * MIB
"""One H100 80GB HBM3."""
WEIGHT_BYTES = 16_381_470_720
"""8.19 billion bfloat16 parameters."""
OTHER_BYTES = 2_300 * MIB
"""CUDA context, activations and graphs on each GPU."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model served."""

    model: str
    """Its name."""
    served_model_name: str
    """The name clients use, label `model_name` of /metrics."""
    max_model_len: int
    """Longest sequence, tokens."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache."""

    block_size: int
    """Tokens a block."""
    num_gpu_blocks: int
    """Blocks, the null block included."""
    enable_prefix_caching: bool = True
    """Whether content is kept for later hits."""
    gpu_memory_utilization: float = 0.92
    """Share of the GPU that vLLM may use."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step."""

    max_num_seqs: int
    """Most requests running at once."""
    max_num_batched_tokens: int
    """Most tokens in a step."""
    policy: str = "fcfs"
    """First come, first served."""
    enable_chunked_prefill: bool = True
    """Long prompts are computed in parts."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """GPUs and ranks."""

    tensor_parallel_size: int
    """GPUs that share the model."""
    pipeline_parallel_size: int = 1
    """Stages that share the layers."""
    data_parallel_size: int = 1
    """Engines."""
    data_parallel_rank: int = 0
    """This engine's number."""
    data_parallel_index: int = 0
    """The same, as newer code calls it."""


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """All of it."""

    model_config: ModelConfig
    """See `ModelConfig`."""
    cache_config: CacheConfig
    """See `CacheConfig`."""
    scheduler_config: SchedulerConfig
    """See `SchedulerConfig`."""
    parallel_config: ParallelConfig
    """See `ParallelConfig`."""
    instance_id: str = "demo"
    """Names this server."""


def kv_cache_config(num_blocks: int, gpus: int, block_size: int = BLOCK_SIZE) -> KVCacheConfig:
    """Layout, on each of `gpus`, of a KV cache of `num_blocks` for the simulated model."""
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(_LAYERS)]
    spec = FullAttentionSpec(block_size, _KV_HEADS // gpus, _HEAD_SIZE)
    page = spec.page_size_bytes
    tensor = KVCacheTensor(page * num_blocks * _LAYERS, names, page * num_blocks, page)
    return KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(names, spec)])


def kv_bytes(config: KVCacheConfig) -> int:
    """Bytes of the KV cache on each GPU."""
    return sum(tensor.size for tensor in config.kv_cache_tensors)


def gpus_needed(num_blocks: int) -> int:
    """GPUs that hold the weights and so many blocks: 1, 2, 4 or 8."""
    for gpus in (1, 2, 4):
        share = WEIGHT_BYTES // gpus + kv_bytes(kv_cache_config(num_blocks, gpus)) + OTHER_BYTES
        if share <= 0.92 * GPU_TOTAL_BYTES:
            return gpus
    return 8


def vllm_config(num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> VllmConfig:
    """The configuration of a simulated server.

    Args:
        num_blocks: Blocks of its pool, the null block included.
        max_num_seqs: Most requests running at once.
        max_num_batched_tokens: Most tokens in a step.

    Raises:
        UsageError: So many blocks cannot be simulated.
    """
    if not MIN_BLOCKS <= num_blocks <= MAX_BLOCKS:
        raise UsageError(
            f"--blocks {num_blocks} is not possible", f"give {MIN_BLOCKS} to {MAX_BLOCKS:,}"
        )
    # As vLLM, which refuses to start with a longest sequence that does not fit the pool.
    longest = min(32_768, (num_blocks - 1) * BLOCK_SIZE)
    return VllmConfig(
        ModelConfig(MODEL, MODEL, longest),
        CacheConfig(BLOCK_SIZE, num_blocks),
        SchedulerConfig(max_num_seqs, max_num_batched_tokens),
        ParallelConfig(gpus_needed(num_blocks)),
    )
