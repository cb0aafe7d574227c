"""`Snapshot`: the only thing shown, recorded, exported and judged.

Units are in the names. `None` is "could not be read"; it is drawn as a dash and
never stands for zero. All times are Unix seconds unless the name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtop.model.blocks import BlockCounts

SCHEMA = 1
"""Version of everything in this module, as JSON and in session files."""


class SourceState(str, Enum):
    """How a source of readings is doing."""

    STARTING = "starting"
    """Nothing read yet."""
    OK = "ok"
    """The last reading worked."""
    STALE = "stale"
    """It answers, but what it says has not moved although it should have."""
    FAILED = "failed"
    """The last reading failed; older values may still be on screen, with their age."""
    OFF = "off"
    """Not asked for: hidden panel, switched off, not installed."""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """What one source says of itself."""

    name: str
    """Unique, for example `nvml`, `metrics 127.0.0.1:8000`, `engine 4740`."""
    kind: str
    """`nvml`, `metrics`, `engine`, `stacks`, `discovery` or `clients`."""
    state: SourceState
    """See `SourceState`."""
    since_s: float
    """When it entered this state."""
    reason: str = ""
    """One plain line; empty when all is well."""
    remedy: str = ""
    """What to do about it; empty when there is nothing to do."""
    value_time_s: float | None = None
    """When the value in use was taken. None: there is none."""
    period_s: float | None = None
    """How often it is read. None: on demand."""
    target_pid: int | None = None
    """The process it looks at. None: not about one process."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process on one GPU."""

    pid: int
    """As NVML reports it; in a container it may belong to another pid namespace."""
    command: str | None
    """Command line, shortened. None: the pid is not visible here."""
    mem_bytes: int | None
    """Memory it uses on this GPU. None: NVML does not tell (WSL, containers, MIG)."""
    engine_pid: int | None
    """The engine core it belongs to. None: not part of a vLLM server found here."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one line that says why it cannot be read."""

    index: int
    """NVML index."""
    uuid: str | None = None
    """NVML UUID."""
    name: str | None = None
    """Product name."""
    mem_total_bytes: int | None = None
    """nvmlDeviceGetMemoryInfo_v2 total, or the system's total when `mem_is_system`."""
    mem_used_bytes: int | None = None
    """Used by processes and driver, `reserved` not included (v2)."""
    mem_reserved_bytes: int | None = None
    """Kept by driver and firmware. None: no v2 memory info."""
    mem_free_bytes: int | None = None
    """Free."""
    mem_is_system: bool = False
    """True on unified-memory parts: the figures are the system's RAM."""
    util_percent: float | None = None
    """Share of time with a kernel running, 0-100."""
    mem_util_percent: float | None = None
    """Share of time the memory controller was busy, 0-100."""
    temperature_c: float | None = None
    """Core temperature."""
    power_w: float | None = None
    """Draw now."""
    power_limit_w: float | None = None
    """Limit in force."""
    sm_clock_mhz: int | None = None
    """SM clock."""
    mem_clock_mhz: int | None = None
    """Memory clock."""
    pcie_rx_bytes_s: float | None = None
    """PCIe into the GPU."""
    pcie_tx_bytes_s: float | None = None
    """PCIe out of the GPU."""
    nvlink_rx_bytes_s: float | None = None
    """NVLink received, all links."""
    nvlink_tx_bytes_s: float | None = None
    """NVLink sent, all links."""
    processes: tuple[GpuProcess, ...] | None = None
    """None: NVML does not tell."""
    simulated: bool = False
    """True in the demo: no such device exists."""
    error: str | None = None
    """Why this GPU cannot be read (lost, hung, no permission). None: it can."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One block pool of an engine at one step."""

    counts: BlockCounts
    """Adds up to `counts.total`."""
    free_queue: int | None = None
    """Length of vLLM's own free queue; equals free + cached, else it is a finding."""
    states: bytes | None = None
    """One `BlockState` byte a block. None: not fetched."""
    refs: bytes | None = None
    """Ref count a block, 255 for 255 and more. None: not fetched."""
    tables: bytes | None = None
    """Number of holders the probe found a block (tables and fences), 255 for 255 and
    more; differs from `refs` only where something is broken. None: not fetched."""
    label: str = "gpu"
    """`gpu`, or what vLLM calls the medium of this pool."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group of a hybrid model; most models have one."""

    index: int
    """Group id in vLLM."""
    kind: str
    """Class of its manager without the suffix, for example `FullAttention`."""
    block_size_tokens: int | None
    """Tokens a block of this group."""
    sliding_window_tokens: int | None = None
    """None: no sliding window."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the probe was put in; None: this vLLM has no such place to count."""

    allocated: int | None = None
    """Blocks handed out by `BlockPool.get_new_blocks`."""
    freed: int | None = None
    """References given back through `BlockPool.free_blocks`. Over a span without other
    paths: allocated + touched - freed = change of the sum of ref counts."""
    touched: int | None = None
    """References added by prefix hits (`BlockPool.touch`)."""
    evicted: int | None = None
    """Cached blocks whose content was dropped for an allocation."""
    alloc_failures: int | None = None
    """`allocate_slots` returned None."""
    preemptions: int | None = None
    """Calls of `_preempt_request`."""
    preempted_blocks: int | None = None
    """Blocks given up by preempted requests."""
    preempted_tokens: int | None = None
    """Computed tokens thrown away by preemption."""
    steps: int | None = None
    """Calls of `Scheduler.schedule`."""


class Phase(str, Enum):
    """What a request is doing, in the words of the field."""

    WAITING = "waiting"
    """In a waiting queue, not yet scheduled."""
    PREFILL = "prefill"
    """Running; prompt (or recompute) not done."""
    DECODE = "decode"
    """Running; generating."""
    PREEMPTED = "preempted"
    """Gave its blocks back and waits to recompute."""
    HELD = "held"
    """Finished or parked, and still holds blocks."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the scheduler sees it."""

    id: str
    """vLLM's request id: text from outside, shown through `draw.text.visible`."""
    status: str
    """vLLM's own status name, for example `RUNNING`."""
    phase: Phase
    """See `Phase`."""
    reason: str | None = None
    """For a waiting request: `capacity`, `deferred`, `remote KV`, `grammar`, `paused`, `streaming`;
    for a held one: `connector`, `finished`, `remote KV`, `streaming`, `orphan table`. None: does
    not apply."""
    arrival_time_s: float | None = None
    """When it reached the server."""
    age_s: float | None = None
    """Seconds since then, at the time of the cut."""
    held_s: float | None = None
    """For a held request: seconds since the probe first saw it held."""
    prompt_tokens: int | None = None
    """Prompt length."""
    output_tokens: int | None = None
    """Tokens generated."""
    max_tokens: int | None = None
    """Limit of generated tokens."""
    computed_tokens: int | None = None
    """Tokens whose KV is in blocks now; falls to 0 at a preemption."""
    cached_tokens: int | None = None
    """Tokens found in the prefix cache when it was last admitted: of the prompt, and after a
    preemption of what it had generated by then as well."""
    blocks: int | None = None
    """Entries of its tables that are not the null block, all groups."""
    shared_blocks: int | None = None
    """Of these, blocks that are in other tables too."""
    slack_tokens: int | None = None
    """Token slots of its blocks that hold nothing yet (tail of the last block, lookahead)."""
    kv_bytes: int | None = None
    """blocks x bytes a block. None: block bytes unknown."""
    preemptions: int | None = None
    """Times it was preempted."""
    owed_blocks: int | None = None
    """Blocks it must get again after a preemption; 0 otherwise."""
    priority: int | None = None
    """Scheduling priority."""
    lora: str | None = None
    """LoRA adapter name. None: base model."""
    client: str | None = None
    """`live`, `gone` (zombie), or None: no API server probe to ask."""
    client_gone_s: float | None = None
    """Seconds since the client was last known. None: does not apply."""


@dataclass(frozen=True, slots=True)
class ProbeInfo:
    """What the probe says of itself."""

    version: str
    """kvtop version of the code inside the engine."""
    step: int
    """Scheduler step of the cut."""
    scan_us: float | None
    """Time that the last cut took on the engine's thread, microseconds. None: not told."""
    cost_percent: float | None
    """Probe time on the engine's thread, share of wall time since the client came, 0-100.
    None: not told."""
    point: str
    """Where the cut was taken: `boundary` (entry of schedule), `idle`, or
    `executing` (between two scheduler calls while the model runs)."""
    cut_time_s: float
    """When the cut was taken."""
    step_age_s: float | None = None
    """Seconds since the engine last began a scheduler step, when the answer was sent."""
    verified_age_s: float | None = None
    """Upper bound of the time since every block was last read directly; 0: in this cut."""
    drift: int = 0
    """Blocks that the audit found changed by a path that the probe does not watch."""
    errors: int = 0
    """Errors of the probe's own; after 10 it stops itself."""
    missing: tuple[str, ...] = ()
    """Facts that this vLLM does not offer, by name."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """From the server's /metrics page; None: no such series (yet)."""

    kv_used_percent: float | None = None
    """`kv_cache_usage_perc` x 100 (before 0.9.2: `gpu_cache_usage_perc`)."""
    running: int | None = None
    """`num_requests_running`."""
    waiting: int | None = None
    """`num_requests_waiting`."""
    waiting_capacity: int | None = None
    """`num_requests_waiting_by_reason{reason="capacity"}` (0.21+)."""
    waiting_deferred: int | None = None
    """`num_requests_waiting_by_reason{reason="deferred"}` (0.21+)."""
    prefix_hit_percent: float | None = None
    """Hits / queries in tokens over the last window with queries; None: no queries in it."""
    prefix_hit_total_percent: float | None = None
    """The same since server start."""
    preemptions_total: float | None = None
    """`num_preemptions_total`."""
    preemptions_s: float | None = None
    """Its rate."""
    prompt_tokens_total: float | None = None
    """`prompt_tokens_total`."""
    prompt_tokens_s: float | None = None
    """Its rate."""
    generation_tokens_total: float | None = None
    """`generation_tokens_total`."""
    generation_tokens_s: float | None = None
    """Its rate."""
    finished_total: dict[str, float] = field(default_factory=dict)
    """`request_success_total` by `finished_reason`."""
    finished_s: float | None = None
    """Rate of all reasons together."""
    num_blocks: int | None = None
    """One engine's blocks: the label `num_gpu_blocks` divided by the engines it sums over."""
    block_size_tokens: int | None = None
    """Label `block_size` of `cache_config_info`."""
    prefix_caching: bool | None = None
    """Label `enable_prefix_caching`."""
    kv_size_tokens: int | None = None
    """Label `kv_cache_size_tokens` (0.24+), per engine."""
    sleep_state: str | None = None
    """`awake`, `weights_offloaded` or `discard_all` (`engine_sleep_state`, 0.11.2+)."""
    gauges_frozen_s: float | None = None
    """Seconds for which no counter has moved while a gauge claims work; None: moving."""
    ttft_p50_s: float | None = None
    """Time to first token, median of the last window, from histogram buckets: an upper bound."""
    itl_p50_s: float | None = None
    """Inter-token latency, median of the last window: an upper bound."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine core and everything known of it."""

    engine: int | None
    """Data-parallel rank, the `engine` label of /metrics. None: not known yet."""
    pid: int | None
    """Process of the engine core. None: only the HTTP side is reachable."""
    server: str
    """The server it belongs to, for example `127.0.0.1:8000`, or `pid 4740`."""
    api_pids: tuple[int, ...] = ()
    """API server processes in front of it."""
    worker_pids: tuple[int, ...] = ()
    """Worker processes under it."""
    alive: bool = True
    """False: its process is gone; the values are its last."""
    orphan: bool = False
    """True: the API server that started it is gone; it goes on holding its memory."""
    process_state: str | None = None
    """The kernel's letter (R, S, D, T, Z). None: not readable."""
    rss_bytes: int | None = None
    """Host memory of the engine core."""
    rss_by_pid: dict[int, int] = field(default_factory=dict)
    """Host memory in bytes of its workers and of the API servers in front of it, by pid; a
    process that cannot be read is not in it."""
    model: str | None = None
    """Served model name."""
    vllm_version: str | None = None
    """vLLM's own version string."""
    block_size: int | None = None
    """Tokens a block (the smallest group's on hybrid models)."""
    block_bytes: int | None = None
    """Bytes a block, all layers, all workers' shares added. None: not known."""
    max_model_len: int | None = None
    """Longest sequence in tokens."""
    max_num_seqs: int | None = None
    """Most requests running at once."""
    prefix_caching: bool | None = None
    """Whether the prefix cache is on."""
    state: str | None = None
    """`running`, `idle`, `paused`, `sleeping`, `starting`, `gone`. None: not known."""
    groups: tuple[Group, ...] = ()
    """KV-cache groups."""
    pools: tuple[Pool, ...] = ()
    """Block pools, the GPU's first. Empty: no probe."""
    counters: Counters | None = None
    """None: no probe."""
    requests: tuple[Request, ...] | None = None
    """None: no probe. Empty: no requests."""
    metrics: EngineMetrics | None = None
    """None: /metrics not readable."""
    probe: ProbeInfo | None = None
    """None: no probe; `probe_reason` says why."""
    probe_reason: str = ""
    """Why there is no probe reading, and what to do. Empty: there is one."""
    last_snapshot: str | None = None
    """Path of what its probe left as it died of an exception. None: nothing, or it lives."""
    simulated: bool = False
    """True in the demo."""

    @property
    def blocks(self) -> BlockCounts | None:
        """Counts of the first pool. None: no probe."""
        return self.pools[0].counts if self.pools else None


@dataclass(frozen=True, slots=True)
class Frame:
    """One function in the stacks of a window."""

    function: str
    """Function name."""
    file: str
    """Short file name as py-spy gives it."""
    line: int | None
    """Line most often seen. None: unknown."""
    thread: str
    """Thread name or id."""
    self_percent: float
    """Share of samples in which it is the innermost frame, 0-100."""
    total_percent: float
    """Share of samples in which it occurs, 0-100."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Top frames of one process over a sliding window."""

    pid: int
    """Process sampled."""
    role: str
    """`engine`, `worker` or `api`."""
    samples: int
    """Samples in the window."""
    window_s: float
    """Length of the window."""
    rate_hz: float
    """Samples a second, as measured."""
    frames: tuple[Frame, ...]
    """Hottest first."""
    time_s: float
    """Time of the newest sample."""
    split: dict[str, float] = field(default_factory=dict)
    """Share of the samples by category (`model.frames`), 0-100, adding up to 100: each active
    thread of a sample counts, and a sample without one as `wait`. Empty: not known."""
    cost_ms: float | None = None
    """CPU time of the sampler for one sample, mean of the window. None: not measured."""
    stalled: bool = False
    """True: no thread was active of late; the frames show where it waits."""
    unread: int = 0
    """Samples that could not be read, since the process ran on meanwhile; not in `samples`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or worth knowing, with its evidence."""

    rule: str
    """Name of the rule, for example `leak.ghost-blocks`."""
    severity: str
    """`info`, `warning` or `critical`."""
    since_s: float
    """When it began."""
    engine_pid: int | None
    """The engine concerned. None: the machine."""
    summary: str
    """Two plain sentences at most."""
    evidence: dict[str, str] = field(default_factory=dict)
    """Numbers and ids, by name."""
    next_step: str = ""
    """What to do."""
    disproof: str = ""
    """What would show that it is wrong."""
    block_ids: tuple[int, ...] = ()
    """Blocks concerned."""
    request_ids: tuple[str, ...] = ()
    """Requests concerned."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything known at one moment."""

    time_s: float
    """Wall clock, UTC."""
    mono_s: float
    """Monotonic clock of the recording machine."""
    host: str
    """Host name."""
    version: str
    """kvtop version that took it."""
    sources: tuple[SourceStatus, ...] = ()
    """All sources, failing ones included."""
    gpus: tuple[Gpu, ...] = ()
    """Empty: none, see the `nvml` source."""
    engines: tuple[Engine, ...] = ()
    """Empty: none found, see the `discovery` source."""
    stacks: tuple[Stacks, ...] = ()
    """Empty: not sampled, see the `stacks` source."""
    demo: bool = False
    """True: simulated."""
    dropped: int = 0
    """Snapshots that the recorder could not keep up with, so far."""
