"""What a probe says when it can give no cut."""

from __future__ import annotations

import pytest

from kvtop.sources.engine import refusal


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", ""),
        (b"[" * 100_000, ""),
        (b"[]", ""),
        (b'{"error": 7}', ""),
        (b'{"error": "no cut"}', ": no cut"),
        (b'{"error": "a\\n\\u001b[31mb", "step_age_s": 0.2}', ": a [31mb"),
        (
            b'{"error": "the engine is inside a scheduler call", "step_age_s": 93.4}',
            ": the engine is inside a scheduler call; its last scheduler step began 93 s ago",
        ),
        (b'{"error": "x", "step_age_s": 1e400}', ": x"),
    ],
)
def test_the_reason_is_its_own(body: bytes, text: str) -> None:
    assert refusal(503, body) == f"the probe answers 503{text}"


def test_a_long_reason_is_cut() -> None:
    assert len(refusal(503, b'{"error": "' + b"x" * 10_000 + b'"}')) < 250
