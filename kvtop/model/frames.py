"""Which Python frames matter to the KV cache: the one table of categories.

Facts: functions and files of vLLM 0.8.5 to 0.32 (`vllm/v1/core/block_pool.py`,
`kv_cache_manager.py`, `kv_cache_coordinator.py`, `single_type_kv_cache_manager.py`,
`vllm/v1/core/sched/scheduler.py`, `vllm/v1/engine/core.py`); the demo uses the same names.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

SCHEDULE = "schedule"
"""The scheduler decides."""
ALLOCATE = "allocate"
"""Blocks are looked up, evicted and handed out."""
FREE = "free"
"""Blocks are given back."""
PREEMPT = "preempt"
"""A request loses its blocks."""
CONNECTOR = "connector"
"""KV is sent, received or offloaded."""
ABORT = "abort"
"""Requests are aborted or finished from outside."""
SAMPLING = "sampling"
"""Tokens are chosen."""
MODEL = "model"
"""The model runs, inputs are prepared."""
WAIT = "wait"
"""Nothing is done: a lock, a queue, a socket, a busy-wait for another process."""
OTHER = "other"
"""All else."""

CATEGORIES = (
    SCHEDULE, ALLOCATE, FREE, PREEMPT, CONNECTOR, ABORT, SAMPLING, MODEL, WAIT, OTHER,
)  # fmt: skip
"""All of them, in the order of every list and legend."""

_CORE = ("vllm/v1/core/", "kvtop/demo/")
_ENGINE = ("vllm/v1/engine/", "kvtop/demo/")
_EXECUTE = ("vllm/v1/executor/", "vllm/v1/worker/", "vllm/v1/engine/", "kvtop/demo/")
_SYNC = (
    "threading.py", "queue.py", "selectors.py", "subprocess.py", "socket.py", "multiprocessing/",
    "zmq/", "asyncio/", "concurrent/", "shm_broadcast.py", "vllm/distributed/utils.py",
)  # fmt: skip

_FUNCTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        ALLOCATE,
        "allocate_slots allocate_new_blocks allocate_new_computed_blocks get_new_blocks touch"
        " allocate_external_computed_blocks add_local_computed_blocks save_new_computed_blocks"
        " _maybe_evict_cached_block evict_blocks get_computed_blocks find_longest_cache_hit"
        " cache_blocks cache_full_blocks popleft popleft_n get_num_blocks_to_allocate"
        " blocks_to_allocate add_hits get_cached_block _allocate_encoder_inputs",
        _CORE,
    ),
    (
        FREE,
        "free free_blocks _free_blocks _free_request _free_request_blocks _drain_deferred_frees"
        " pop_blocks_for_free remove_skipped_blocks append_n prepend_n reset_prefix_cache"
        " _free_encoder_inputs free_block_hashes",
        _CORE,
    ),
    (PREEMPT, "_preempt_request preempt_request", _CORE),
    (
        CONNECTOR,
        "_build_kv_connector_meta _connector_finished _update_from_kv_xfer_finished"
        " _update_waiting_for_remote_kv _handle_failed_recving _handle_invalid_blocks"
        " get_computed_blocks_for_connector",
        _CORE,
    ),
    (
        ABORT,
        "abort_requests _process_aborts_queue finish_requests abort _send_abort_outputs"
        " _send_abort_outputs_to_client",
        (*_CORE, *_ENGINE),
    ),
    (
        SCHEDULE,
        "schedule update_from_output _update_after_schedule _make_cached_request_data make_stats"
        " _schedule_running _schedule_waiting _admit _make_room add_request get_grammar_bitmask"
        " _update_request_with_output _handle_stopped_request _check_stop",
        _CORE,
    ),
    (SAMPLING, "sample_tokens sample _sample compute_logits", _EXECUTE),
    (
        MODEL,
        "execute_model execute_dummy_batch _prepare_inputs _model_forward _dummy_run"
        " _update_states collective_rpc",
        _EXECUTE,
    ),
    (
        WAIT,
        "wait get poll _poll select accept recv recv_multipart _recv _recv_bytes recv_bytes join"
        " _wait_for_tstate_lock sched_yield acquire_read dequeue _wait_for_response result"
        " wait_for_notify _try_wait get_response",
        _SYNC,
    ),
    (WAIT, "_wait_for_input", ("kvtop/demo/",)),
)
_PLACES = (
    ("vllm/distributed/kv_transfer/", CONNECTOR),
    ("vllm/v1/kv_offload/", CONNECTOR),
    ("vllm/v1/simple_kv_offload/", CONNECTOR),
    ("vllm/v1/sample/", SAMPLING),
    ("vllm/v1/structured_output/", SAMPLING),
    ("vllm/v1/spec_decode/", MODEL),
    ("vllm/v1/core/sched/", SCHEDULE),
    ("vllm/v1/worker/", MODEL),
    ("vllm/v1/attention/", MODEL),
    ("vllm/model_executor/", MODEL),
    ("vllm/compilation/", MODEL),
    ("torch/nn/", MODEL),
)
"""Files whose every function has a category, unless a name above says otherwise."""
_LOOPS = frozenset({"worker_busy_loop", "worker_main", "run_busy_loop"})
"""Functions in those files that only hold the process's main loop."""

_BY_NAME: dict[str, list[tuple[tuple[str, ...], str]]] = {}
for _category, _names, _files in _FUNCTIONS:
    for _name in _names.split():
        _BY_NAME.setdefault(_name, []).append((_files, _category))


@lru_cache(maxsize=65536)
def own_category(function: str, file: str) -> str | None:
    """The category that a frame has by itself. None: it takes that of its caller.

    Args:
        function: Name as py-spy gives it, with or without its class.
        file: Short or full file name.
    """
    name = function.rpartition(".")[2]
    for places, category in _BY_NAME.get(name, ()):
        if any(place in file for place in places):
            return category
    if name in _LOOPS:
        return None
    return next((category for place, category in _PLACES if place in file), None)


@lru_cache(maxsize=65536)
def split_frame(label: str) -> tuple[str, str, int | None]:
    """Function, file and line of a frame as py-spy writes it: `f (a.py:3)`.

    A label that is not of this form is all function; unknown lines are None.
    """
    if not label.endswith(")"):
        return label, "", None
    function, mark, place = label[:-1].rpartition(" (")
    if not mark:
        return label, "", None
    file, colon, number = place.rpartition(":")
    if colon and number.isdecimal() and len(number) < 10:
        return function, file, int(number) or None
    return function, place, None


@lru_cache(maxsize=65536)
def label_category(label: str) -> str | None:
    """`own_category` of a frame as py-spy writes it."""
    function, file, _ = split_frame(label)
    return own_category(function, file)


def stack_category(calls: Iterable[tuple[str, str]]) -> str:
    """The category of a stack: that of its innermost frame that has one, else `other`.

    Args:
        calls: Function and file of each frame, innermost first.
    """
    for function, file in calls:
        category = own_category(function, file)
        if category is not None:
            return category
    return OTHER
