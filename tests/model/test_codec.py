"""The codec carries every snapshot there and back, and refuses what is none."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib

import pytest
from hypothesis import HealthCheck, given, settings

from kvtop.errors import BadDataError
from kvtop.model import codec
from kvtop.model.blocks import BlockCounts
from kvtop.model.snapshot import (
    SCHEMA,
    Engine,
    EngineMetrics,
    Finding,
    Gpu,
    Phase,
    Pool,
    ProbeInfo,
    Request,
    Snapshot,
)
from tests.model.strategies import snapshots

COUNTS = BlockCounts(total=8, null=1, free=3, cached=1, used=2, shared=1, held=0, ghost=0)
STATES = bytes([6, 0, 0, 0, 1, 2, 2, 3])


def _snapshot() -> Snapshot:
    pool = Pool(counts=COUNTS, free_queue=4, states=STATES, refs=bytes(8), tables=bytes(8))
    request = Request(id="a[/x]b", status="RUNNING", phase=Phase.DECODE, blocks=3)
    engine = Engine(
        engine=0,
        pid=4740,
        server="127.0.0.1:8000",
        model="m",
        vllm_version="0.32.0",
        block_size=16,
        pools=(pool,),
        requests=(request,),
        metrics=EngineMetrics(running=1),
        probe=ProbeInfo("0.1.0", 7, 12.5, 0.01, "boundary", 10.0),
    )
    return Snapshot(10.5, 3.25, "box", "0.1.0", gpus=(Gpu(0),), engines=(engine,))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(snapshots())
def test_round_trip(snapshot: Snapshot) -> None:
    text = json.dumps(codec.to_json(snapshot), allow_nan=False)
    assert codec.from_json(json.loads(text)) == snapshot


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(snapshots())
def test_once_is_json_without_columns(snapshot: Snapshot) -> None:
    out = codec.once_json(snapshot)
    json.dumps(out, allow_nan=False)
    for engine in out["engines"]:
        for pool in engine["pools"]:
            assert not {"states", "refs", "tables"} & set(pool)


def test_none_is_kept_and_is_not_zero() -> None:
    out = codec.to_json(Snapshot(1.0, 1.0, "h", "v", gpus=(Gpu(0),)))
    assert out["gpus"][0]["util_percent"] is None
    assert codec.from_json(out).gpus[0].util_percent is None


def test_unknown_keys_are_ignored_and_defaults_fill_in() -> None:
    out = codec.to_json(_snapshot())
    out["later"] = {"x": 1}
    out["engines"][0]["later"] = 1
    del out["gpus"]
    assert codec.from_json(out) == dataclasses.replace(_snapshot(), gpus=())


def test_numbers_that_json_cannot_hold_become_null() -> None:
    gpu = Gpu(0, util_percent=math.nan, power_w=math.inf)
    out = codec.to_json(Snapshot(1.0, 1.0, "h", "v", gpus=(gpu,)))
    json.dumps(out, allow_nan=False)
    back = codec.from_json(out).gpus[0]
    assert back.util_percent is None
    assert back.power_w is None


def test_findings_stand_beside_the_snapshot() -> None:
    finding = Finding("leak", "warning", 1.0, 4740, "s", evidence={"n": "3"}, block_ids=(1, 2))
    out = codec.to_json(_snapshot(), [finding])
    assert out["findings"][0]["block_ids"] == [1, 2]
    assert codec.decode(Finding, out["findings"][0]) == finding
    assert codec.from_json(out) == _snapshot()


def test_newer_schema_is_refused_in_one_plain_line() -> None:
    out = {**codec.to_json(_snapshot()), "schema": SCHEMA + 1}
    with pytest.raises(BadDataError, match=r"newer kvtop \(schema 2") as caught:
        codec.from_json(out)
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("schema",), None, "schema version"),
        (("schema",), True, "schema version"),
        (("time_s",), "now", "time_s is not a number"),
        (("time_s",), None, "time_s is not a number"),
        (("time_s",), 10**400, "time_s is too large"),
        (("host",), 3, "host is not text"),
        (("engines",), {}, "engines is not a list"),
        (("engines", 0, "pid"), 1.5, "engines.pid is not a whole number"),
        (("engines", 0, "pid"), True, "engines.pid is not a whole number"),
        (("engines", 0, "alive"), 1, "engines.alive is not true or false"),
        (("engines", 0, "requests", 0, "phase"), "flying", "phase is none of the known words"),
        (("engines", 0, "requests", 0, "phase"), [], "phase is none of the known words"),
        (("engines", 0, "pools", 0, "states"), "%%%", "states is not a byte column"),
        (("engines", 0, "pools", 0, "states"), "AAAA", "states is not a byte column"),
        (("engines", 0, "pools", 0, "counts"), None, "counts is not an object"),
    ],
)
def test_misfits_name_the_field(path: tuple[str | int, ...], value: object, text: str) -> None:
    out = codec.to_json(_snapshot())
    place: object = out
    for key in path[:-1]:
        place = place[key]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    with pytest.raises(BadDataError, match=text):
        codec.from_json(out)


def test_missing_field_is_named() -> None:
    out = codec.to_json(_snapshot())
    del out["engines"][0]["server"]
    with pytest.raises(BadDataError, match=r"engines\.server is missing"):
        codec.from_json(out)


@pytest.mark.parametrize("data", [None, [], "x", 1])
def test_not_an_object(data: object) -> None:
    with pytest.raises(BadDataError):
        codec.from_json(data)


def test_a_column_that_unpacks_too_large_is_refused() -> None:
    packed = zlib.compress(bytes(2_000))
    assert codec.inflate(packed, 2_000) == bytes(2_000)
    with pytest.raises(ValueError, match="whole"):
        codec.inflate(packed, 1_999)
    with pytest.raises(ValueError, match="whole"):
        codec.inflate(packed + b"x", 2_000)
    with pytest.raises(ValueError, match="whole"):
        codec.inflate(packed[:-1], 2_000)


def test_columns_travel_as_base64_of_zlib() -> None:
    out = codec.to_json(_snapshot())
    text = out["engines"][0]["pools"][0]["states"]
    assert zlib.decompress(base64.b64decode(text)) == STATES


def test_once_contract() -> None:
    out = codec.once_json(_snapshot())
    assert list(out) == ["schema", "time", "sources", "gpus", "engines", "stacks", "findings"]
    assert out["schema"] == SCHEMA
    assert out["time"] == 10.5
    (engine,) = out["engines"]
    assert engine["blocks"] == {
        "total": 8,
        "null": 1,
        "free": 3,
        "cached": 1,
        "used": 2,
        "shared": 1,
        "held": 0,
        "ghost": 0,
    }
    assert {"engine", "pid", "model", "vllm_version", "block_size", "counters", "metrics"} <= set(
        engine
    )
    assert engine["probe"]["version"] == "0.1.0"
    assert engine["probe"]["scan_us"] == 12.5
    assert engine["probe"]["cost_percent"] == 0.01
    assert engine["probe"]["step"] == 7
    assert engine["requests"][0]["id"] == "a[/x]b"


def test_once_without_a_probe_says_null() -> None:
    bare = Snapshot(1.0, 1.0, "h", "v", engines=(Engine(None, None, "127.0.0.1:1"),))
    (engine,) = codec.once_json(bare)["engines"]
    for name in ("blocks", "counters", "requests", "metrics", "probe"):
        assert engine[name] is None
