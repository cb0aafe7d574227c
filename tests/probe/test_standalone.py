"""The probe can be carried into another process as text: nothing but the standard library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvtop.probe

FOLDER = Path(kvtop.probe.__file__).parent
MODULES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_a_module_imports_only_the_standard_library_and_the_probe(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import does not survive being carried as text"
            names = [node.module]
        for name in names:
            top = name.split(".")[0]
            assert name.startswith("kvtop.probe") or top in sys.stdlib_module_names, name


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_a_module_reads_nothing_beside_itself(path):
    names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
    assert "__file__" not in names


def test_it_works_when_only_its_text_is_there():
    sources = {f"kvtop.probe.{p.stem}": p.read_text() for p in MODULES if p.stem != "__init__"}
    code = f"""
import importlib.machinery, sys, types
sources = {sources!r}
for name in ("kvtop", "kvtop.probe"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in sources:
            return importlib.machinery.ModuleSpec(name, Finder)
    @staticmethod
    def create_module(spec): return None
    @staticmethod
    def exec_module(module):
        exec(compile(sources[module.__name__], "<kvtop>", "exec"), module.__dict__)
sys.meta_path.insert(0, Finder)
from kvtop.probe import control
print(control.status())
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"],
        input=code,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.strip() == "None", done.stderr
