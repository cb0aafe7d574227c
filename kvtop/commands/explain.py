"""`kvtop explain RULE`: what a finding means, when it starts and ends, and what to do."""

from __future__ import annotations

import argparse
import difflib
import textwrap

from kvtop.config import load
from kvtop.detect.diagnosis import MEANING, NAMES
from kvtop.detect.rule import Rule, in_words
from kvtop.detect.rules import ALL_RULES, BY_NAME
from kvtop.detect.thresholds import Thresholds, apply_overrides, table
from kvtop.errors import ExitCode, NotFoundError

_WIDTH = 88


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("rule", help="name of a rule, as `kvtop findings` lists it")


def run(options: argparse.Namespace) -> int:
    """Print what one rule means.

    Raises:
        NotFoundError: There is no such rule.
        UsageError: The configuration is wrong.
    """
    limits = apply_overrides(load({}).findings)
    if options.rule in NAMES:
        print(f"{options.rule}\n{NAMES[options.rule]}.\n\n{_wrap(MEANING)}")
        return ExitCode.OK
    print(explain(find(options.rule), limits))
    return ExitCode.OK


def find(name: str) -> Rule:
    """The rule of that name; the part after the dot is enough where it is unique.

    Raises:
        NotFoundError: There is none, or more than one.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    short = [rule for rule in ALL_RULES if rule.name.partition(".")[2] == name]
    if len(short) == 1:
        return short[0]
    near = difflib.get_close_matches(name, [*BY_NAME, *NAMES], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise NotFoundError(f"there is no rule {name!r}", f"{hint}`kvtop findings` lists them")


def explain(rule: Rule, limits: Thresholds) -> str:
    """The documentation of one rule, with the thresholds in force."""
    known = {threshold.name: threshold for threshold in table()}
    parts = [f"{rule.name}  ({rule.severity})", rule.title + ".", "", _wrap(rule.explanation), ""]
    for label, text in (
        ("Starts", in_words(rule.starts, limits)),
        ("Ends", in_words(rule.clears, limits)),
        ("Do", rule.next_step),
        ("Wrong if", rule.disproof),
        ("Needs", rule.needs),
        ("Hidden by", ", ".join(rule.yields_to)),
    ):
        if text:
            parts.append(_wrap(f"{label + ':':<11}{text}", indent=11))
    names = [name for name in rule.thresholds if name in known]
    if names:
        parts += ["", "Thresholds ([findings] in the config file):"]
    for name in names:
        value = in_words("{" + name + "}", limits)
        parts.append(f"  {name:<24}  {value:<12}  {known[name].meaning}")
    return "\n".join(parts)


def _wrap(text: str, indent: int = 0) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
