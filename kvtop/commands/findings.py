"""`kvtop findings`: every rule in one line, or every threshold with its value in force."""

from __future__ import annotations

import argparse
import json

from kvtop.config import load
from kvtop.detect.rules import ALL_RULES
from kvtop.detect.thresholds import Thresholds, apply_overrides, table
from kvtop.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument(
        "--thresholds", action="store_true", help="list the thresholds and their values instead"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what kvtop can find.

    Raises:
        UsageError: The configuration is wrong.
    """
    limits = apply_overrides(load({}).findings)
    if options.thresholds:
        print(_thresholds_json(limits) if options.json else _thresholds_text(limits))
    else:
        print(_rules_json() if options.json else _rules_text())
    return ExitCode.OK


def _rules_text() -> str:
    width = max(len(rule.name) for rule in ALL_RULES)
    lines = [f"{rule.name:<{width}}  {rule.severity:<8}  {rule.title}" for rule in ALL_RULES]
    lines += [
        "",
        "`kvtop explain RULE` tells what a rule means, when it starts and ends, and what to do.",
        "`kvtop findings --thresholds` lists the numbers; [findings] in the config file sets them.",
    ]
    return "\n".join(lines)


def _thresholds_text(limits: Thresholds) -> str:
    lines = []
    for threshold in table():
        value = getattr(limits, threshold.name)
        mark = "" if value == threshold.default else f" (default {threshold.default:g})"
        number = f"{value:g} {threshold.unit}".rstrip()
        lines.append(f"{threshold.name:<24}  {number:<14}  {threshold.meaning}{mark}")
    return "\n".join(lines)


def _rules_json() -> str:
    rows = [
        {
            "rule": rule.name,
            "severity": rule.severity,
            "family": rule.family,
            "title": rule.title,
            "needs": rule.needs,
            "thresholds": list(rule.thresholds),
        }
        for rule in ALL_RULES
    ]
    return json.dumps(rows, indent=2)


def _thresholds_json(limits: Thresholds) -> str:
    rows = [
        {
            "name": threshold.name,
            "value": getattr(limits, threshold.name),
            "default": threshold.default,
            "unit": threshold.unit,
            "low": threshold.low,
            "high": threshold.high,
            "meaning": threshold.meaning,
        }
        for threshold in table()
    ]
    return json.dumps(rows, indent=2)
