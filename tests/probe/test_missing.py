"""An engine that lacks what the probe looks for: nothing is invented in its place."""

from __future__ import annotations

import http.client
import json
import socket

from probe_fakes import Engine

from kvtop.probe import control
from kvtop.probe.answer import COLUMNS, pool_json
from kvtop.probe.engine import EngineRole
from kvtop.probe.facts import EngineFacts
from kvtop.probe.watch import MAX_ERRORS


def cut(engine):
    """A role with one cut of an engine that stands still."""
    role = EngineRole(EngineFacts(engine), 0, lambda: None)
    role.start()
    role.capture.reset()
    raw = None
    while raw is None:
        raw = role.capture.slice(on_engine=True)
    role._take(raw)
    role.stop()
    return role


def worked(**options):
    engine = Engine(blocks=64, **options)
    for _ in range(3):
        engine.add(9, 9)
    for _ in range(3):
        engine.step()
    return engine


def check_no_holder_is_known(engine, pool):
    used = sum(b.ref_cnt > 0 and not b.is_null for b in pool.blocks)
    role = cut(engine)
    assert "block tables" in role.facts.missing
    assert "block tables" not in role.facts.found
    pool = pool_json(role.ledger.pools[0], columns=True)
    counts = pool["counts"]
    assert counts["used"] == used > 3
    assert (counts["shared"], counts["held"], counts["ghost"]) == (0, 0, 0)
    assert counts["free"] + counts["cached"] == pool["free_queue"]
    assert pool["tables"] is None
    assert pool["states"]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in role._row_list]
    assert len(rows) == 3
    for row in rows:
        unknown = ("blocks", "shared_blocks", "slack_tokens", "kv_bytes")
        assert [row[name] for name in unknown] == [None] * 4
        assert row["computed_tokens"] > 0


def test_without_any_table_a_referenced_block_is_no_ghost():
    engine = worked()
    pool = engine.pools[0]
    engine.scheduler.kv_cache_manager.coordinator.single_type_managers = []
    check_no_holder_is_known(engine, pool)


def test_with_some_tables_only_nothing_is_said_of_holders():
    engine = worked(window=8)
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    del managers[1].req_to_blocks
    check_no_holder_is_known(engine, engine.pools[0])


def test_a_scheduler_that_loses_its_requests_stops_the_probe_and_it_says_so(probe_dir, monkeypatch):
    monkeypatch.setattr("kvtop.probe.engine.FRESH_S", 0.0)
    monkeypatch.setattr("kvtop.probe.engine.MAX_COST", 1.0)
    engine = worked()
    probe = control.install(engine, directory=probe_dir)

    class Http(http.client.HTTPConnection):
        def connect(self):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(20)
            self.sock.connect(probe.socket_path)

    client = Http("probe")  # One connection all along: it waits again after each refusal.

    def get(target):
        client.request("GET", target)
        response = client.getresponse()
        return response.status, json.loads(response.read())

    assert get("/v1/snapshot")[0] == 200
    requests = engine.scheduler.requests
    del engine.scheduler.requests
    answers = [get("/v1/snapshot") for _ in range(MAX_ERRORS)]
    assert {status for status, _ in answers} == {503}
    assert "requests" in answers[0][1]["error"]
    hello = get("/v1/hello")[1]
    assert hello["state"] == "stopped"
    assert hello["reason"].startswith("10 errors of the probe's own, the last: AttributeError")
    engine.scheduler.requests = requests
    engine.step()
    assert "schedule" not in vars(engine.scheduler)
