"""The README says what is true: its keys, its options, its exit codes, its pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtop.cli import COMMANDS
from kvtop.config import _ENV
from kvtop.errors import ExitCode
from kvtop.model.blocks import LETTERS
from kvtop.ui.keys import markdown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_keys_are_the_table_of_the_app() -> None:
    """To mend it: paste the output of `kvtop.ui.keys.markdown()`."""
    start = README.index("<!-- keys")
    between = README[README.index("\n", start) : README.index("<!-- end of keys")]
    assert between.strip() == markdown().strip()


def test_every_exit_code_is_listed() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.M)}
    assert listed == {int(code) for code in ExitCode}


def test_every_variable_is_listed() -> None:
    assert set(re.findall(r"`(KVTOP_[A-Z]+)` \| `--", README)) == set(_ENV)


def test_every_state_has_its_letter() -> None:
    for state, letter in LETTERS.items():
        assert f"| {state.name.lower()} | `{letter}` |" in README


def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"(?:^ {4}|`)kvtop ([a-z]+)", README, re.M))
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)]+\.svg)\)", README))
def test_pictures_are_there(path: str) -> None:
    assert (ROOT / path).read_text().startswith("<svg ")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"^ *python3 -m venv \.venv && .*pytest$", README, re.M)
    assert len(commands) == 1
    assert "README.md" in (ROOT / ".ci/run").read_text()
