"""The forms of `--url`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.errors import UsageError
from kvtop.sources.metrics_url import normalize_url, short_name


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/metrics", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/metrics/", "http://127.0.0.1:8000"),
        ("http://h:8000/llm/metrics", "http://h:8000/llm"),
        ("http://h:8000/llm/", "http://h:8000/llm"),
        ("http://h:8000/metrics/a", "http://h:8000/metrics/a"),
        ("HTTPS://Example.org", "https://example.org"),
        ("https://example.org/v1", "https://example.org/v1"),
        ("gpu-box:9000", "http://gpu-box:9000"),
        ("gpu-box", "http://gpu-box:8000"),
        ("gpu_box/llm", "http://gpu_box:8000/llm"),
        ("127.0.0.1:8000/metrics", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("http://[::1]", "http://[::1]"),
        (":8001", "http://127.0.0.1:8001"),
        ("8001", "http://127.0.0.1:8001"),
        (":8001/llm", "http://127.0.0.1:8001/llm"),
        ("  host:1  ", "http://host:1"),
    ],
)
def test_accepted(given: str, url: str) -> None:
    assert normalize_url(given) == url
    assert normalize_url(url) == url


@pytest.mark.parametrize(
    "given",
    [
        "", " ", "http://", "://x", "ftp://x", "file:///etc/passwd", "unix:///run/x", "http:///x",
        "host:port", "host:0", "host:99999", "host:-1", "host:", "http://host:", "a b", "a\nb",
        "a\x1b[2J", "http://user:secret@host", "http://host?x=1", "http://host/#a", "http://[::1",
        "http://[zz]", "http://..", "-host", "http://h/\u00fc", "hôst", "x" * 3000, "http://a//b c",
    ],
)  # fmt: skip
def test_refused_with_one_plain_line(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        normalize_url(given)
    line = caught.value.line()
    assert line.isprintable()
    assert "--url" in line
    assert len(line) < 400


def test_a_password_is_not_needed_to_be_repeated() -> None:
    assert short_name("http://127.0.0.1:8000/llm") == "127.0.0.1:8000/llm"


@given(st.text(max_size=60))
def test_never_anything_but_a_url_or_a_usage_error(text: str) -> None:
    try:
        url = normalize_url(text)
    except UsageError:
        return
    assert url.startswith(("http://", "https://"))
    assert url.isascii()
    assert url.isprintable()
    assert not url.endswith("/")
    assert normalize_url(url) == url
