"""What leaves the file for other tools: right numbers, no markup, and no names if so asked."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import json
import re
import sqlite3
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvtop.detect.judge import Judge
from kvtop.errors import UsageError
from kvtop.model.codec import from_json, to_json
from kvtop.model.snapshot import Finding, Phase, Request, Snapshot, SourceState, SourceStatus
from kvtop.session import export, perfetto, tables
from kvtop.session.anonymize import Anonymizer
from kvtop.session.reader import SessionReader
from kvtop.session.recorder import Recorder
from kvtop.session.report import html_report, markdown_report
from kvtop.session.summary import gather
from kvtop.session.writer import SessionWriter
from tests.session.common import offer, recorded, small, stored

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "=HYPERLINK(1)",
    "+1",
    "@SUM(1)",
    "a,b;c\nd\r\ne\t",
    "\x1b[31mred\x00",
    "'; DROP TABLE tick; --",
    "]}],",
    "|a|b|\n# title\n[x](javascript:alert(1))",
    "\ud800 half",
    "\u202egnp",
)

SECRETS = (
    "gpu-node-17.acme.example",
    "10.20.30.40",
    "secret-lab",
    "Acme-8B-Instruct",
    "GPU-0badc0de",
    "bob",
    "chatcmpl-",
    "adapter-of-acme",
)


def _hostile(path: Path) -> list[Snapshot]:
    churn = small()
    writer = SessionWriter(path, 1.0)
    live = []
    for _ in range(5):
        snapshot = churn.tick()
        requests = tuple(
            Request(text, "RUNNING", Phase.DECODE, blocks=3, lora=text) for text in HOSTILE
        )
        source = SourceStatus(HOSTILE[0], "x", SourceState.FAILED, 1.0, HOSTILE[1], HOSTILE[2])
        snapshot = dataclasses.replace(
            snapshot,
            host=HOSTILE[0],
            sources=(source,),
            engines=(
                dataclasses.replace(
                    snapshot.engines[0], requests=requests, model=HOSTILE[1], server=HOSTILE[2]
                ),
            ),
            gpus=(dataclasses.replace(snapshot.gpus[0], name=HOSTILE[0]),),
        )
        writer.write(snapshot)
        live.append(snapshot)
    writer.marker(snapshot.time_s, HOSTILE[9])
    writer.close()
    return live


def test_csv_numbers_and_units(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 40)
    with SessionReader(tmp_path / "a.kvtop") as reader:
        rows = list(csv.DictReader(io.StringIO("".join(export.csv_text(reader, "gpu")))))
        assert len(rows) == 40
        for row, snapshot in zip(rows, live, strict=True):
            gpu = snapshot.gpus[0]
            assert int(row["mem_used_bytes"]) == gpu.mem_used_bytes
            assert float(row["power_w"]) == gpu.power_w
            assert row["nvlink_rx_bytes_s"] == ""
        rows = list(csv.DictReader(io.StringIO("".join(export.csv_text(reader, "engine")))))
        counts = [snapshot.engines[0].blocks for snapshot in live]
        assert [int(r["blocks_cached"]) for r in rows] == [c.cached for c in counts if c]
        for table in tables.table_names():
            names = next(csv.reader(io.StringIO("".join(export.csv_text(reader, table)))))
            assert names[0] in ("tick", "request")
        with pytest.raises(UsageError, match="no table 'x'"):
            "".join(export.csv_text(reader, "x"))


def test_json_lines(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 10)
    with SessionReader(tmp_path / "a.kvtop") as reader:
        lines = "".join(export.json_text(reader, None)).splitlines()
        assert [from_json(json.loads(line)) for line in lines] == [stored(s) for s in live]
        rows = [json.loads(line) for line in export.json_text(reader, "engine")]
        assert rows[3]["blocks_total"] == 300
        assert rows[3]["waiting_capacity"] is None


def test_perfetto_reads_back_with_the_same_numbers(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 80, blocks=200, requests=12)
    with SessionReader(tmp_path / "a.kvtop") as reader:
        trace = json.loads("".join(perfetto.trace_text(reader)))
        events = timeline_of_preempted(reader)
    items = trace["traceEvents"]
    blocks = [item for item in items if item["ph"] == "C" and item["name"] == "KV blocks"]
    for item, snapshot in zip(blocks, live, strict=True):
        counts = snapshot.engines[0].blocks
        assert counts is not None
        assert item["args"] == {
            name: getattr(counts, name)
            for name in ("free", "cached", "used", "shared", "held", "ghost")
        }
        assert item["ts"] == round(snapshot.time_s * 1e6)
    memory = [item for item in items if item["ph"] == "C" and item["name"] == "mem_used_bytes"]
    assert [m["args"]["mem_used_bytes"] for m in memory] == [s.gpus[0].mem_used_bytes for s in live]
    instants = [item for item in items if item["ph"] == "i" and "preempted" in item["name"]]
    assert len(instants) == events > 0
    # Slices nest: for each request as many ends as begins, and never an end before its begin.
    depth: Counter[int] = Counter()
    lives: dict[int, list[int]] = {}
    for item in items:
        if item.get("cat") == "request":
            number = int(item["id2"]["local"], 16)
            depth[number] += 1 if item["ph"] == "b" else -1
            assert depth[number] >= 0
            lives.setdefault(number, []).append(item["ts"])
    assert set(depth.values()) == {0}
    assert len(lives) == len({r.id for s in live for r in s.engines[0].requests or ()})
    begins = {item["name"]: item["ts"] for item in items if item["ph"] == "b" and "args" in item}
    for request in live[0].engines[0].requests or ():
        assert begins[request.id] == round(live[0].time_s * 1e6)


def timeline_of_preempted(reader: SessionReader) -> int:
    rows = reader.sql("SELECT count(*) FROM request_event WHERE phase = 'preempted'")
    return int(rows[0][0])


def test_hostile_text_in_csv(tmp_path: Path) -> None:
    _hostile(tmp_path / "a.kvtop")
    with SessionReader(tmp_path / "a.kvtop") as reader:
        for table in tables.table_names():
            text = "".join(export.csv_text(reader, table))
            rows = list(csv.reader(io.StringIO(text)))
            assert len({len(row) for row in rows}) == 1
            assert text.count("\n") == len(rows)
            for row in rows:
                for value in row:
                    assert value.isprintable()
                    assert not value.startswith(("=", "+", "@"))
                    assert not re.match(r"-\D", value)


def test_hostile_text_in_a_trace(tmp_path: Path) -> None:
    _hostile(tmp_path / "a.kvtop")
    with SessionReader(tmp_path / "a.kvtop") as reader:
        items = json.loads("".join(perfetto.trace_text(reader)))["traceEvents"]
    names = {item["name"] for item in items}
    assert HOSTILE[0] in names
    assert all(name.isprintable() for name in names)


class _Strict(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_hostile_text_in_a_report(tmp_path: Path) -> None:
    _hostile(tmp_path / "a.kvtop")

    def judge(snapshot: Snapshot) -> tuple[Finding, ...]:
        text = HOSTILE[1]
        return (
            Finding(text, "critical", 1.0, 1, text, {text: text}, text, text, (1,), HOSTILE[:2]),
        )

    with SessionReader(tmp_path / "a.kvtop") as reader:
        summary = gather(reader, judge)
    page = html_report(summary)
    parser = _Strict()
    parser.feed(page)
    assert not {"script", "img", "link", "iframe", "a"} & set(parser.tags)
    assert not any(name.startswith("on") or name in ("href", "src") for name in parser.attributes)
    assert HOSTILE[0] in "".join(parser.text)
    assert "default-src 'none'" in page
    assert "http" not in re.sub(r"http-equiv", "", page)
    text = markdown_report(summary)
    assert "<script" not in text
    assert "[x](" not in text
    assert "\n# title" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows if "DROP" in row}) == 1


def test_a_report_says_what_happened(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 120, blocks=200, requests=12)
    with SessionReader(tmp_path / "a.kvtop") as reader:
        summary = gather(reader, Judge().judge)
    assert summary.ticks == 120
    counters = [s.engines[0].counters for s in live]
    first, last = counters[0], counters[-1]
    assert first is not None
    assert last is not None
    assert summary.engines[0].preemptions == (last.preemptions or 0) - (first.preemptions or 0) > 0
    used = [value for _, value in summary.engines[0].series["blocks_used"]]
    assert used == [s.engines[0].blocks.used for s in live if s.engines[0].blocks]
    assert summary.findings
    page = html_report(summary)
    parser = _Strict()
    parser.feed(page)
    assert parser.tags["svg"] >= 3
    assert all(parser.tags[tag] for tag in ("polygon", "polyline", "h2", "table"))
    assert "half" in "".join(parser.text)
    assert summary.most_held[0].block_seconds == max(
        row.block_seconds or 0 for row in summary.most_held
    )


def test_a_report_of_almost_nothing(tmp_path: Path) -> None:
    writer = SessionWriter(tmp_path / "a.kvtop")
    writer.write(Snapshot(1.0, 1.0, "", "0"))
    writer.close()
    with SessionReader(tmp_path / "a.kvtop") as reader:
        summary = gather(reader, Judge().judge)
    assert "Nothing was found." in html_report(summary)
    assert "Nothing was found." in markdown_report(summary)


def _with_secrets(snapshot: Snapshot) -> Snapshot:
    source = SourceStatus(
        "metrics 10.20.30.40:8000",
        "metrics",
        SourceState.FAILED,
        1.0,
        "connection to gpu-node-17.acme.example refused for bob (/home/bob/secret-lab/x.sock)",
        "ask bob@gpu-node-17.acme.example",
    )
    engine = snapshot.engines[0]
    requests = tuple(
        dataclasses.replace(request, lora="adapter-of-acme") for request in engine.requests or ()
    )
    return dataclasses.replace(
        snapshot,
        sources=(*snapshot.sources, source),
        engines=(dataclasses.replace(engine, requests=requests),),
    )


def _all_text(path: Path) -> str:
    """Every byte of a file as text, and everything packed inside it unpacked."""
    parts = [path.read_bytes().decode("latin-1")]
    with SessionReader(path) as reader:
        parts += [json.dumps(to_json(snapshot)) for snapshot in reader.snapshots()]
        parts += ["".join(export.csv_text(reader, table)) for table in tables.table_names()]
    db = sqlite3.connect(path)
    parts += db.iterdump()
    db.close()
    return "\n".join(parts)


def _known() -> Anonymizer:
    return Anonymizer([("host", "gpu-node-17.acme.example"), ("user", "bob")])


def test_recording_anonymized_never_writes_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    recorder = Recorder(path, anonymizer=_known())
    recorder.start()
    churn = small()
    live = [_with_secrets(churn.tick()) for _ in range(30)]
    for snapshot in live:
        offer(recorder, snapshot)
    marked = live[-1].engines[0].requests
    assert marked
    while not recorder.marker(live[-1].time_s, f"bob saw {marked[0].id} on 10.20.30.40"):
        pass
    recorder.stop()
    text = _all_text(path)
    assert [secret for secret in SECRETS if secret in text] == []
    with SessionReader(path) as reader:
        assert reader.info.anonymized
        for got, was in zip(reader.snapshots(), live, strict=True):
            new, old = got.engines[0], was.engines[0]
            assert [pool.states for pool in new.pools] == [pool.states for pool in old.pools]
            assert [r.blocks for r in new.requests or ()] == [r.blocks for r in old.requests or ()]
            assert got.gpus[0].mem_used_bytes == was.gpus[0].mem_used_bytes
            assert new.server.endswith(":8000")


def test_the_same_name_is_the_same_stand_in_everywhere(tmp_path: Path) -> None:
    recorded(tmp_path / "a.kvtop", 60)
    with SessionReader(tmp_path / "a.kvtop") as reader:
        anonymizer = tables.warm_anonymizer(reader)
        export.session(reader, tmp_path / "b.kvtop", anonymizer)
        seen: dict[str, str] = {}
        with SessionReader(tmp_path / "b.kvtop") as hidden:
            assert hidden.last_tick == reader.last_tick
            for a, b in zip(reader.snapshots(), hidden.snapshots(), strict=True):
                for x, y in zip(
                    a.engines[0].requests or (), b.engines[0].requests or (), strict=True
                ):
                    assert seen.setdefault(x.id, y.id) == y.id
            rows = [json.loads(line) for line in export.json_text(reader, "request", anonymizer)]
            assert [row["id"] for row in rows] == [
                seen[i] for (i,) in reader.sql("SELECT id FROM request")
            ]
        assert len(set(seen.values())) == len(seen)
    assert [secret for secret in SECRETS if secret in _all_text(tmp_path / "b.kvtop")] == []


@pytest.mark.parametrize("form", ["csv", "json", "trace", "html", "md"])
def test_no_form_tells_a_name_when_asked_not_to(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a.kvtop"
    churn = small()
    writer = SessionWriter(path)
    for _ in range(30):
        writer.write(_with_secrets(churn.tick()))
    writer.marker(churn.now_s, "on gpu-node-17.acme.example, /data/secret-lab/Acme-8B-Instruct")
    writer.close()
    with SessionReader(path) as reader:
        anonymizer = tables.warm_anonymizer(reader)
        anonymizer.name("user", "bob")
        if form == "csv":
            text = "".join(
                "".join(export.csv_text(reader, name, anonymizer)) for name in tables.table_names()
            )
        elif form == "json":
            text = "".join(export.json_text(reader, None, anonymizer))
        elif form == "trace":
            text = "".join(perfetto.trace_text(reader, anonymizer))
        else:
            summary = gather(reader, Judge().judge, anonymizer)
            text = html_report(summary) if form == "html" else markdown_report(summary)
    assert len(text) > 500
    assert [secret for secret in SECRETS if secret in text] == []


WHERE = (
    ("10.1.2.3:8000", "10.1.2.3"),
    ("[2001:db8::1]:8000", "2001:db8::1"),
    ("gpu-box.internal:8000", "gpu-box"),
    ("gpubox:8000/team-x", "gpubox"),
    ("unix:/run/acme.sock", "acme"),
)
"""A server's address, and what of it must not be seen."""


@pytest.mark.parametrize(("server", "secret"), WHERE)
@pytest.mark.parametrize("has_engine", [True, False], ids=["engine", "address only"])
def test_no_address_is_left(tmp_path: Path, server: str, secret: str, has_engine: bool) -> None:
    bare = server.removeprefix("unix:").partition("/team")[0]
    if has_engine is False and server.startswith("unix:"):
        name = "discovery"
    else:
        name = f"metrics {server}"
    reason = f"http://{bare} refused; nothing answers at {bare}, nor at {bare.rpartition(':')[0]}."
    if server.startswith("unix:"):
        reason = f"no answer at {bare} ({bare})."
    source = SourceStatus(name, "metrics", SourceState.FAILED, 1.0, reason, f"ask {bare}")
    churn = small()
    shown = []
    for _ in range(6):
        snapshot = churn.tick()
        engine = dataclasses.replace(snapshot.engines[0], server=server, probe_reason=reason)
        engines = (engine,) if has_engine else ()
        sources = (source, *snapshot.sources)
        shown.append(dataclasses.replace(snapshot, engines=engines, sources=sources))
    note = f"{reason} seen by bob@{bare}"
    recorder = Recorder(tmp_path / "live.kvtop", anonymizer=_known())
    recorder.start()
    writer = SessionWriter(tmp_path / "a.kvtop")
    for snapshot in shown:
        offer(recorder, snapshot)
        writer.write(snapshot)
    writer.marker(churn.now_s, note)
    writer.close()
    while not recorder.marker(shown[-1].time_s, note):
        pass
    recorder.stop()
    texts = {"recorded": _all_text(tmp_path / "live.kvtop")}
    with SessionReader(tmp_path / "a.kvtop") as reader:
        for form in ("session", "csv", "json", "trace", "html", "md"):
            hide = tables.warm_anonymizer(reader)
            if form == "session":
                export.session(reader, tmp_path / "b.kvtop", hide)
                texts[form] = _all_text(tmp_path / "b.kvtop")
            elif form == "csv":
                names = tables.table_names()
                texts[form] = "".join("".join(export.csv_text(reader, n, hide)) for n in names)
            elif form == "json":
                texts[form] = "".join(export.json_text(reader, None, hide))
            elif form == "trace":
                texts[form] = "".join(perfetto.trace_text(reader, hide))
            else:
                summary = gather(reader, Judge().judge, hide)
                texts[form] = html_report(summary) if form == "html" else markdown_report(summary)
    assert [form for form, text in texts.items() if secret in text or "team-x" in text] == []
    # The port and that it is a Unix socket may stay.
    if has_engine:
        assert (":8000" if ":8000" in server else "unix:path-") in texts["recorded"]


def test_text_that_only_looks_like_an_address_is_kept() -> None:
    hide = Anonymizer([("host", "box")])
    kept = (
        "since 12:04:51 and 2026-11-30T00:05:04Z, probe.py:123, [::1]:8000, localhost:8000, :8000",
        "vllm.v1.engine.core broke off; vllm:num_requests_running; ::; VLLM::EngineCore_DP0",
        "check the address in --url and the network, for example http://127.0.0.1:8000",
        "torch 2.9.0+cpu.",
    )
    for text in kept:
        assert hide.text(text) == text
    assert hide.text("http://bob:word@localhost:8000") == "http://localhost:8000"
    # A stand-in is not replaced again.
    assert hide.text("http://box:8000, box:8000") == "http://host-1:8000, host-1:8000"
    assert hide.text("10.1.2.3. fe80::1ff:fe23, gpu.corp") == "host-2. host-4, host-3"
    assert hide.text("--host 'two words' of pid 3") == "--host 'host-5' of pid 3"


def test_what_is_kept_when_names_are_hidden() -> None:
    hide = Anonymizer()
    assert hide.server("127.0.0.1:8000") == "127.0.0.1:8000"
    assert hide.server("pid 4740") == "pid 4740"
    assert hide.path("/home/bob/venv/lib/python3.11/site-packages/vllm/x.py") == "vllm/x.py"
    assert hide.path("/home/bob/vllm/v1/core/sched.py") == "vllm/v1/core/sched.py"
    assert hide.path("vllm/v1/core/sched.py") == "vllm/v1/core/sched.py"
    assert hide.path("/home/bob/private/x.py") == "path-1"
    assert hide.command("VLLM::EngineCore") == "VLLM::EngineCore"
    assert hide.command("/home/bob/x -m y") == "command-1"
    assert hide.text("no answer from 127.0.0.1 in 2 s") == "no answer from 127.0.0.1 in 2 s"
    assert hide.text("vLLM 0.11.2 says 1.5") == "vLLM 0.11.2 says 1.5"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    recorded(tmp_path / "a.kvtop", 3)
    out = tmp_path / "out"
    out.write_text("mine")
    with SessionReader(tmp_path / "a.kvtop") as reader:
        with pytest.raises(UsageError, match="already there"):
            export.write_text(export.csv_text(reader, "gpu"), out)
        with pytest.raises(UsageError, match="already there"):
            export.session(reader, out)
    assert out.read_text() == "mine"


def test_parquet(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 20)
    with SessionReader(tmp_path / "a.kvtop") as reader:
        if importlib.util.find_spec("pyarrow") is None:
            with pytest.raises(UsageError, match="needs pyarrow"):
                export.parquet(reader, "engine", tmp_path / "x.parquet")
            assert not (tmp_path / "x.parquet").exists()
            return
        import pyarrow.parquet as arrow

        assert export.parquet(reader, "engine", tmp_path / "x.parquet") == 20
    table = arrow.read_table(tmp_path / "x.parquet")
    counts = [s.engines[0].blocks for s in live]
    assert table.column("blocks_used").to_pylist() == [c.used for c in counts if c]
    assert table.schema.field("kv_used_percent").type == "double"
    assert table.column("waiting_capacity").to_pylist() == [None] * 20
