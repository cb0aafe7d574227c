"""What the probe answers, turned into the model. Pure.

What comes back is a `model.snapshot.Engine` with the fields that the probe knows;
`stream.merge` adds what /metrics and /proc know. The answer comes from another
process, maybe of another version: every field is checked, a missing one is None.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar
from urllib.parse import quote

from kvtop.errors import BadDataError
from kvtop.model.blocks import BlockCounts, BlockState, count_states
from kvtop.model.detail import Detail
from kvtop.model.snapshot import (
    Counters,
    Engine,
    Group,
    Phase,
    Pool,
    ProbeInfo,
    Request,
)

PROBE_SCHEMA = 1
"""Version of the probe's answers that this module reads (`kvtop.probe`)."""

MAX_ROWS = 50_000
"""Most requests that one answer may list."""

MAX_ITEMS = 256
"""Most pools, groups and names that one answer may list; the rest is left out."""

MAX_TEXT = 4_096
"""Longest text kept, in characters; a longer one is cut."""

MAX_NUMBER = 2**63
"""Numbers beyond it, infinities and NaN are unknown; nothing that is counted gets there."""

MAX_POOL_BLOCKS = 2**26
"""Columns that unpack to more are refused, whatever their compressed size."""

_T = TypeVar("_T", int, float, str, bool)

_REQUEST_FIELDS = {field.name: field.type for field in fields(Request)}


def _opt(data: Mapping[str, Any], name: str, kind: type[_T]) -> _T | None:
    value = data.get(name)
    if isinstance(value, bool) and kind is not bool:
        return None
    if isinstance(value, (int, float)) and not _sane(value):
        return None
    if kind is float and isinstance(value, int):
        return kind(value)
    if isinstance(value, str) and kind is str:
        return kind(value[:MAX_TEXT])
    return value if isinstance(value, kind) else None


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    value = data.get(name)
    return value[:MAX_ITEMS] if isinstance(value, list) else []


def _sane(value: float) -> bool:
    """Whether a number is one that an engine could mean: finite, within 64 bits."""
    return abs(value) <= MAX_NUMBER


def _load(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise BadDataError("the probe's answer is not JSON") from None


def _column(data: Mapping[str, Any], name: str, length: int) -> bytes | None:
    packed = data.get(name)
    if packed is None:
        return None
    if not isinstance(packed, str):
        raise BadDataError(f"the probe's column {name} is not text")
    try:
        unpacker = zlib.decompressobj()
        column = unpacker.decompress(base64.b64decode(packed, validate=True), MAX_POOL_BLOCKS)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise BadDataError(f"the probe's column {name} cannot be unpacked: {error}") from None
    if len(column) != length:
        raise BadDataError(f"the probe's column {name} has {len(column)} blocks, not {length}")
    return column


def _pool(data: Mapping[str, Any]) -> Pool:
    counts_data = data.get("counts")
    if not isinstance(counts_data, dict):
        raise BadDataError("the probe's pool has no counts")
    numbers = {field.name: _opt(counts_data, field.name, int) for field in fields(BlockCounts)}
    if any(number is None or number < 0 for number in numbers.values()):
        raise BadDataError("the probe's block counts are not whole numbers")
    counts = BlockCounts(**{name: number or 0 for name, number in numbers.items()})
    states = _column(data, "states", counts.total)
    if states is not None:
        if states and max(states) > max(BlockState):
            raise BadDataError(f"the probe knows a block state {max(states)}, kvtop does not")
        if count_states(states) != counts:
            raise BadDataError("the probe's block counts do not match its own block states")
    return Pool(
        counts=counts,
        free_queue=_opt(data, "free_queue", int),
        states=states,
        refs=_column(data, "refs", counts.total),
        tables=_column(data, "tables", counts.total),
        label=_opt(data, "label", str) or "gpu",
    )


def _request_value(name: str, value: Any) -> Any:
    """`value` if it has the type of the field, else None."""
    kind = str(_REQUEST_FIELDS[name])
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)) and not _sane(value):
        return None
    if kind.startswith("int"):
        return value if isinstance(value, int) else None
    if kind.startswith("float"):
        return float(value) if isinstance(value, (int, float)) else None
    return value if isinstance(value, str) else None


def _requests(data: Any) -> tuple[Request, ...] | None:
    if not isinstance(data, dict):
        return None
    columns, rows = data.get("columns"), data.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list):
        raise BadDataError("the probe's requests have no columns and rows")
    if len(rows) > MAX_ROWS:
        raise BadDataError(
            f"the probe lists {len(rows)} requests; more than {MAX_ROWS} are refused"
        )
    known = [
        (i, name)
        for i, name in enumerate(columns)
        if isinstance(name, str) and name in _REQUEST_FIELDS
    ]
    requests = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(columns):
            raise BadDataError("a request row of the probe does not fit its columns")
        values = {name: _request_value(name, row[i]) for i, name in known}
        try:
            values["phase"] = Phase(values["phase"])
            requests.append(Request(**values))
        except (KeyError, TypeError, ValueError):
            raise BadDataError("a request row of the probe lacks its id, status or phase") from None
    return tuple(requests)


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    if not isinstance(section, dict):
        raise BadDataError(f"the probe's answer has no {name}")
    return section


def parse_snapshot(body: bytes) -> Engine:
    """An `Engine` from the body of the probe's /v1/snapshot.

    Raises:
        BadDataError: It is not such a body, or contradicts itself.
    """
    data = _load(body)
    if not isinstance(data, dict) or data.get("schema") != PROBE_SCHEMA:
        seen = data.get("schema") if isinstance(data, dict) else None
        raise BadDataError(
            f"the probe speaks schema {seen}, this kvtop speaks {PROBE_SCHEMA}",
            "use the same kvtop version on both sides, or `kvtop attach --replace`",
        )
    engine, probe = _section(data, "engine"), _section(data, "probe")
    cut_time_s = _opt(data, "time_s", float)
    if cut_time_s is None:
        raise BadDataError("the probe's answer has no time")
    step = _opt(probe, "step", int)
    if step is None:
        raise BadDataError("the probe's answer has no step")
    counters = data.get("counters")
    return Engine(
        engine=_opt(engine, "index", int),
        pid=_opt(engine, "pid", int),
        server="",
        model=_opt(engine, "model", str),
        vllm_version=_opt(engine, "vllm_version", str),
        block_size=_opt(engine, "block_size", int),
        block_bytes=_opt(engine, "block_bytes", int),
        max_model_len=_opt(engine, "max_model_len", int),
        max_num_seqs=_opt(engine, "max_num_seqs", int),
        prefix_caching=_opt(engine, "prefix_caching", bool),
        state=_opt(engine, "state", str),
        simulated=_opt(engine, "simulated", bool) or False,
        groups=tuple(
            Group(
                index=_opt(group, "index", int) or 0,
                kind=_opt(group, "kind", str) or "?",
                block_size_tokens=_opt(group, "block_size_tokens", int),
                sliding_window_tokens=_opt(group, "sliding_window_tokens", int),
            )
            for group in _list(engine, "groups")
            if isinstance(group, dict)
        ),
        pools=tuple(_pool(pool) for pool in _list(data, "pools") if isinstance(pool, dict)),
        counters=Counters(
            **{field.name: _opt(counters, field.name, int) for field in fields(Counters)}
        )
        if isinstance(counters, dict)
        else None,
        requests=_requests(data.get("requests")),
        probe=ProbeInfo(
            version=_opt(probe, "version", str) or "?",
            step=step,
            scan_us=_opt(probe, "scan_us", float),
            cost_percent=_opt(probe, "cost_percent", float),
            point=_opt(probe, "point", str) or "?",
            cut_time_s=cut_time_s,
            step_age_s=_opt(probe, "step_age_s", float),
            verified_age_s=_opt(probe, "verified_age_s", float),
            drift=_opt(probe, "drift", int) or 0,
            errors=_opt(probe, "errors", int) or 0,
            missing=tuple(name[:100] for name in _list(probe, "missing") if isinstance(name, str)),
        ),
    )


def parse_clients(body: bytes) -> frozenset[str] | None:
    """Ids of the requests that still have a client, from an API server's probe.

    Returns:
        None when this vLLM's API server does not tell.

    Raises:
        BadDataError: It is not such a body.
    """
    data = _load(body)
    clients = data.get("clients") if isinstance(data, dict) else None
    if not isinstance(clients, list):
        return None
    return frozenset(name for name in clients if isinstance(name, str))


def parse_detail(request_id: str, body: bytes) -> Detail:
    """One request's block tables from the probe's /v1/requests/<id>.

    Raises:
        BadDataError: It is not such a body.
    """
    data = _load(body)
    if isinstance(data, dict) and data.get("found") is False:
        return Detail(request_id, error="the engine no longer has this request")
    try:
        tables = tuple(
            (int(table["group"]), _opt(table, "block_size_tokens", int), _ids(table["blocks"]))
            for table in data["tables"]
        )
        refs = tuple(_ids(row) for row in data["refs"])
        shared = {
            int(block): tuple(str(other) for other in others)
            for block, others in data["shared_with"].items()
        }
        step = _opt(data, "step", int)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise BadDataError("the probe's answer about a request cannot be read") from None
    if [len(row) for row in refs] != [len(blocks) for _, _, blocks in tables]:
        raise BadDataError("the probe's ref counts do not fit its block tables")
    return Detail(request_id, step, tables, refs, shared)


def _ids(values: list[Any]) -> tuple[int, ...]:
    ids = tuple(int(value) for value in values)
    if any(not 0 <= number <= MAX_NUMBER for number in ids):
        raise ValueError("not a block id or ref count")
    return ids


def request_path(request_id: str) -> str:
    """The probe's path for one request's block table."""
    return "/v1/requests/" + quote(request_id.encode("utf-8", "surrogatepass"), safe="")
