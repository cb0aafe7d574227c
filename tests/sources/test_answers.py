"""What the probe answers, understood or refused; never half understood."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.errors import BadDataError
from kvtop.model.blocks import BlockState, count_states
from kvtop.model.snapshot import Phase
from kvtop.sources.answers import parse_clients, parse_snapshot, request_path


def pack(column: bytes) -> str:
    return base64.b64encode(zlib.compress(column)).decode()


def answer(**changes: Any) -> dict[str, Any]:
    states = bytes([BlockState.NULL, BlockState.USED, BlockState.USED, BlockState.FREE])
    counts = count_states(states)
    data: dict[str, Any] = {
        "schema": 1,
        "time_s": 1000.5,
        "age_s": 0.0,
        "probe": {"version": "0.1.0", "step": 9, "scan_us": 12.5, "cost_percent": 0.01},
        "engine": {"index": 0, "pid": 42, "model": "tiny", "block_size": 16},
        "pools": [
            {
                "label": "gpu",
                "free_queue": 1,
                "counts": {
                    name: getattr(counts, name)
                    for name in ("total", "null", "free", "cached", "used", "shared")
                }
                | {"held": 0, "ghost": 0},
                "states": pack(states),
                "refs": pack(b"\0\1\1\0"),
                "tables": pack(b"\0\1\1\0"),
            }
        ],
        "counters": {"allocated": 2, "freed": 0},
        "requests": {
            "columns": ["id", "status", "phase", "blocks", "unheard_of"],
            "rows": [["cmpl-1", "RUNNING", "decode", 2, 5]],
        },
    }
    return data | changes


def body(data: object) -> bytes:
    return json.dumps(data).encode()


def test_a_whole_answer() -> None:
    engine = parse_snapshot(body(answer()))
    assert engine.pid == 42
    assert engine.blocks is not None
    assert (engine.blocks.used, engine.blocks.free, engine.blocks.total) == (2, 1, 4)
    assert engine.pools[0].refs == b"\0\1\1\0"
    assert engine.requests is not None
    (request,) = engine.requests
    assert (request.id, request.phase, request.blocks) == ("cmpl-1", Phase.DECODE, 2)
    assert request.prompt_tokens is None
    assert engine.counters is not None
    assert engine.counters.touched is None
    assert engine.probe is not None
    assert engine.probe.cut_time_s == 1000.5


def test_columns_are_optional() -> None:
    data = answer()
    for name in ("states", "refs", "tables"):
        del data["pools"][0][name]
    assert parse_snapshot(body(data)).pools[0].states is None


def wrong_counts(data: dict[str, Any]) -> None:
    data["pools"][0]["counts"]["used"] = 1


def short_column(data: dict[str, Any]) -> None:
    data["pools"][0]["refs"] = pack(b"\0")


def junk_column(data: dict[str, Any]) -> None:
    data["pools"][0]["refs"] = "!!!"


def bomb(data: dict[str, Any]) -> None:
    data["pools"][0]["states"] = pack(bytes(100_000))


def unknown_state(data: dict[str, Any]) -> None:
    data["pools"][0]["states"] = pack(b"\x06\x02\x02\x63")


def negative(data: dict[str, Any]) -> None:
    data["pools"][0]["counts"]["free"] = -1


def ragged_row(data: dict[str, Any]) -> None:
    data["requests"]["rows"].append(["x"])


def no_phase(data: dict[str, Any]) -> None:
    data["requests"]["rows"][0][2] = "dancing"


def newer(data: dict[str, Any]) -> None:
    data["schema"] = 2


def no_engine(data: dict[str, Any]) -> None:
    del data["engine"]


@pytest.mark.parametrize(
    "spoil",
    [
        wrong_counts,
        short_column,
        junk_column,
        bomb,
        unknown_state,
        negative,
        ragged_row,
        no_phase,
        newer,
        no_engine,
    ],
)
def test_a_contradiction_is_refused(spoil: Any) -> None:
    data = answer()
    spoil(data)
    with pytest.raises(BadDataError):
        parse_snapshot(body(data))


def test_wrong_types_are_unknown_not_invented() -> None:
    data = answer()
    data["engine"] = {"index": "0", "pid": True, "block_size": 16.5, "model": 3}
    engine = parse_snapshot(body(data))
    assert (engine.engine, engine.pid, engine.block_size, engine.model) == (None,) * 4


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "1" + "0" * 400])
def test_numbers_beyond_any_counter_are_unknown(number: str) -> None:
    text = json.dumps(answer()).replace('"pid": 42', f'"pid": {number}')
    assert parse_snapshot(text.encode()).pid is None
    text = json.dumps(answer()).replace('"scan_us": 12.5', f'"scan_us": {number}')
    assert parse_snapshot(text.encode()).probe


def test_what_the_probe_does_not_tell_of_itself_is_unknown() -> None:
    data = answer()
    data["probe"] = {"version": "0.1.0", "step": 9}
    probe = parse_snapshot(body(data)).probe
    assert probe is not None
    assert (probe.scan_us, probe.cost_percent) == (None, None)
    del data["probe"]["step"]
    with pytest.raises(BadDataError, match="no step"):
        parse_snapshot(body(data))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BadDataError):
        parse_snapshot(b"[" * 100_000)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@given(st.binary(max_size=200))
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(BadDataError):
        parse_snapshot(junk)


@given(st.sampled_from(sorted(answer())), json_values)
def test_any_part_replaced_never_crashes(name: str, value: object) -> None:
    try:
        parse_snapshot(body(answer() | {name: value}))
    except BadDataError:
        return


def test_clients() -> None:
    assert parse_clients(b'{"clients": ["a", 3, "b"]}') == {"a", "b"}
    assert parse_clients(b'{"clients": null}') is None
    with pytest.raises(BadDataError):
        parse_clients(b"junk")


def test_hostile_ids_stay_one_path_segment() -> None:
    assert request_path("a/../b?c#d\n[/x]") == "/v1/requests/a%2F..%2Fb%3Fc%23d%0A%5B%2Fx%5D"
