from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from kvtop.errors import BadDataError, DeniedError, StorageError, UsageError
from kvtop.flame import files, html, speedscope, svg
from kvtop.flame.capture import Capture, Plan, title_of
from kvtop.flame.folded import Folded, parse
from kvtop.flame.tree import build

ROWS = [
    (('process 1:"serve"', "thread (1): Main", "run (a.py:1)", 'hot<&"\x1b> (b.py:22)'), 70),
    (('process 1:"serve"', "thread (1): Main", "run (a.py:1)"), 10),
    (('process 1:"serve"', "thread (2): Out", "wait (threading.py:3)"), 20),
]
FOLDED = Folded(ROWS, title="box </script><b> pid 1")

# Of the npm package speedscope 1.25.0, dist/release; its licence is beside it.
SCHEMA = json.loads(
    Path(__file__).with_name("data").joinpath("speedscope/file-format-schema.json").read_text()
)


def validate(text: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(text)
    jsonschema.Draft7Validator(SCHEMA).validate(data)
    return data


@pytest.mark.parametrize("hz", [None, 200.0])
def test_speedscope_is_valid(hz: float | None) -> None:
    data = validate(speedscope.write(FOLDED, "name", "kvtop 1", hz))
    assert data["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = data["shared"]["frames"]
    assert {"name": "run", "file": "a.py", "line": 1} in frames
    assert [profile["name"] for profile in data["profiles"]] == ["1 Main", "1 Out"]
    for profile in data["profiles"]:
        assert profile["type"] == "sampled"
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] == pytest.approx(sum(profile["weights"]))
        assert all(0 <= n < len(frames) for sample in profile["samples"] for n in sample)
    total = sum(profile["endValue"] for profile in data["profiles"])
    assert total == pytest.approx(100 / hz if hz else 100)


@pytest.mark.parametrize("unit", ["samples", "microseconds", "bytes", "furlongs"])
def test_speedscope_of_any_unit_is_valid(unit: str) -> None:
    rows = [(("no marks",), 3), (("a (b.py)", "c (d.py:0)"), 1)]
    data = validate(speedscope.write(Folded(rows, unit), "", "", None))
    assert data["profiles"][0]["unit"] == {"samples": "none", "furlongs": "none"}.get(unit, unit)


def test_the_schema_can_tell() -> None:
    data = json.loads(speedscope.write(FOLDED, "name", "kvtop 1", None))
    data["profiles"][0]["unit"] = "samples"
    with pytest.raises(jsonschema.ValidationError):
        validate(json.dumps(data))


def test_speedscope_is_read_back() -> None:
    found = speedscope.read(speedscope.write(FOLDED, "name", "kvtop 1", None))
    assert found.title == "name"
    assert dict(found.stacks) == {
        ("1 Main", "run (a.py:1)", 'hot<&"\x1b> (b.py:22)'): 70,
        ("1 Main", "run (a.py:1)"): 10,
        ("1 Out", "wait (threading.py:3)"): 20,
    }


def test_evented_profiles_are_read() -> None:
    data = {
        "$schema": speedscope.SCHEMA_URL,
        "shared": {"frames": [{"name": "a"}, {"name": "b", "file": "b.py", "line": 3}]},
        "profiles": [
            {
                "type": "evented",
                "name": "t",
                "unit": "milliseconds",
                "startValue": 0,
                "endValue": 10,
                "events": [
                    {"type": "O", "frame": 0, "at": 0},
                    {"type": "O", "frame": 1, "at": 4},
                    {"type": "C", "frame": 1, "at": 7},
                    {"type": "C", "frame": 0, "at": 10},
                ],
            }
        ],
    }
    found = speedscope.read(json.dumps(data))
    assert found.unit == "microseconds"
    assert dict(found.stacks) == {("a",): 7000, ("a", "b (b.py:3)"): 3000}


def _profile(samples: str, weights: str) -> str:
    profile = f'{{"type": "sampled", "samples": {samples}, "weights": {weights}}}'
    return f'{{"shared": {{"frames": [{{"name": "a"}}]}}, "profiles": [{profile}]}}'


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "1",
        '{"shared": {"frames": []}, "profiles": []}',
        _profile("[[5]]", "[1]"),
        _profile("[[-1]]", "[1]"),
        _profile("[[0]]", "[]"),
        _profile("[[0]]", "[NaN]"),
        _profile("[[0]]", '["x"]'),
        '{"shared": {"frames": [{}]}, "profiles": [3]}',
    ],
)
def test_speedscope_that_is_broken(text: str) -> None:
    with pytest.raises(BadDataError, match="speedscope"):
        speedscope.read(text)


def test_the_picture_parses_and_has_the_frames() -> None:
    root = ElementTree.fromstring(svg.write(build(FOLDED), FOLDED.title, "100 samples"))
    space = "{http://www.w3.org/2000/svg}"
    titles = [node.text or "" for node in root.iter(f"{space}title")]
    assert any(
        title.startswith("run (a.py:1): 80 samples, 80.00 %, self 10.00 %") for title in titles
    )
    assert any('hot<&"�> (b.py:22): 70 samples' in title for title in titles)
    assert any("wait (threading.py:3)" in title and title.endswith(", wait") for title in titles)
    rects = {
        title: float(group.find(f"{space}rect").attrib["width"])  # type: ignore[union-attr]
        for group in root.iter(f"{space}g")
        for title in [group.find(f"{space}title").text or ""]  # type: ignore[union-attr]
    }
    hot = next(width for title, width in rects.items() if title.startswith("hot"))
    assert hot == pytest.approx(0.7 * svg.WIDTH, abs=1)
    text = " ".join(node.text or "" for node in root.iter(f"{space}text"))
    assert "box </script><b> pid 1" in text


def test_heads_of_the_picture_have_lines_of_their_own_and_fit() -> None:
    root = ElementTree.fromstring(svg.write(build(FOLDED), "t" * 400, "n" * 400))
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    title, note, legend = texts[:3]
    assert float(title.attrib["y"]) < float(note.attrib["y"]) - 11
    assert float(note.attrib["y"]) < float(legend.attrib["y"]) - 11
    for node, size in ((title, 14), (note, 11)):
        assert (node.text or "").endswith("…")
        # 0.6 of the size is what a character of the usual monospace fonts takes.
        assert svg.WIDTH * 0.9 < len(node.text or "") * size * 0.6 < svg.WIDTH - 8


@pytest.mark.parametrize(
    ("words", "who", "shares"),
    [
        ({}, "busy threads only", "shares are of busy samples, not of time"),
        ({"idle": True}, "busy and waiting threads", ""),
        ({"gil": True}, "only the thread with Python's lock", "not of time"),
    ],
)
def test_a_capture_says_what_it_counts(words: dict[str, bool], who: str, shares: str) -> None:
    plan = Plan(os.getpid(), seconds=10, rate_hz=200, **words)  # type: ignore[arg-type]
    note = files.note_of(Capture(plan, FOLDED, 0.0, 10.0, 35, 0))
    assert note.startswith(f"35 samples in 10 s, {who} (2,000 looks asked for, 200 a second)")
    assert shares in note
    assert ("waiting is left out" in note) == bool(shares)
    assert who in title_of(plan, 0.0)


def test_the_page_is_one_file_and_holds_the_tree() -> None:
    page = html.write(build(FOLDED), FOLDED.title, "n")
    assert page.count("</script>") == 2
    assert "box &lt;/script&gt;" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert data["total"][0] == 100
    assert "run (a.py:1)" in data["labels"]
    assert data["end"][0] == len(data["label"])
    assert len({len(data[name]) for name in ("label", "parent", "end", "own", "total", "cat")}) == 1
    assert not re.search(r"(?:src|href|url)\s*=?\(?[\"']?(?:https?:)?//", page)


def test_a_huge_tree_is_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "_MOST_NODES", 10)
    rows = [((f"f{n}",), 1) for n in range(50)] + [(("big", "inner"), 10**6)]
    page = html.write(build(Folded(rows)), "t")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert len(data["label"]) == 3
    assert data["parent"] == [-1, 0, 1]
    assert data["end"] == [3, 3, 3]


@pytest.mark.parametrize("form", list(files.FORMATS))
def test_files_are_written_whole(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"x{files.FORMATS[form]}"
    assert files.format_of(path) == form
    files.write(path, files.render(FOLDED, form, "note", 10.0))
    assert path.read_text("utf-8")
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError):
        files.write(tmp_path / "taken", "x")
    assert [item.name for item in tmp_path.iterdir()] == ["taken"]
    with pytest.raises((StorageError, DeniedError)):
        files.write(Path("/proc/kvtop.svg"), "x")


def test_formats_and_names() -> None:
    with pytest.raises(UsageError, match="unknown format 'gif'"):
        files.render(FOLDED, "gif")
    assert files.format_of(Path("a.json")) == "speedscope"
    assert files.format_of(Path("a.txt")) == "folded"
    assert files.format_of(Path("a")) is None
    name = files.default_name(7, 0.0, "svg", host="a/b ;c")
    assert name == "kvtop-a_b__c-7-19700101T000000Z.svg"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x7fELF\0\0 17\na;b 3\n", "binary"),
        (b"\x1f\x8b\x08\x00\x00 1\n", "binary"),
        ("a;b 3\n".encode("utf-16"), "binary"),
        (b"", "empty"),
        (b"a;b -3\n", "no line"),
        (b"a;b " + b"9" * 400, "no line"),
        (b"".join(b"f%d 9000000000000000\n" % n for n in range(600)), "too large"),
        (b'{"traceEvents": []}', "no speedscope file"),
        (b'{"a":' * 50_000, "not JSON"),
        (_profile("[[0]]", "[1e308]").encode(), "too large"),
        (_profile("[[0]]", "[1]")[:-20].encode(), "not JSON"),
    ],
)
def test_hostile_files_are_one_plain_line(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(BadDataError, match=text) as caught:
        files.load(path)
    assert len(caught.value.line().splitlines()) == 1


def test_lines_that_are_no_stacks_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("a;b 1.5\nc 2\nnonsense\n")
    found = files.load(path)
    assert (found.total, found.skipped) == (2, 2)
    assert found.title == "x, 2 lines not read"


def test_either_kind_of_file_is_read(tmp_path: Path) -> None:
    one, two, bad = tmp_path / "one", tmp_path / "two", tmp_path / "bad"
    one.write_text("a;b 3\n")
    two.write_text(speedscope.write(parse("a;b 3"), "n", "e"))
    bad.write_bytes(b"\x00\xff{")
    assert files.load(one).total == files.load(two).total == 3
    with pytest.raises(BadDataError, match=re.escape(str(bad))):
        files.load(bad)


def test_a_small_share_is_not_nothing() -> None:
    core = "vllm/v1/core/sched/scheduler.py"
    tree = build(Folded([(("a (b.py:1)",), 999), ((f"Scheduler.schedule ({core}:1)",), 1)]))
    texts = [node.text for node in ElementTree.fromstring(svg.write(tree, "t")).iter()]
    assert "schedule <1%" in texts
    assert "other >99%" in texts
    assert "schedule &lt;1%" in html.write(tree, "t")
