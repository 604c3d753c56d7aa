"""The Rust example: what needs only the standard library is compiled and run, the rest goes as far as it can."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import missing

ROOT = Path(__file__).parents[2]
RUST = ROOT / "examples" / "rust"
GOLDEN = ROOT / "docs" / "golden.json"


def run(*command: str, directory: Path = RUST, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("module", ["hash", "place"])
def test_modules_without_crates_compile_and_pass(module: str, tmp_path: Path) -> None:
    if shutil.which("rustc") is None:
        missing("rustc")
    program = tmp_path / module
    built = run("rustc", "--edition", "2021", "--test", "-A", "dead_code", "-o", str(program), f"src/{module}.rs")
    assert built.returncode == 0, built.stderr
    done = run(str(program))
    assert done.returncode == 0, done.stdout
    assert "0 failed" in done.stdout


def test_the_twin_agrees_with_the_golden_bytes() -> None:
    done = run(sys.executable, "twin.py", str(GOLDEN))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 5


def test_the_twin_notices_a_changed_struct(tmp_path: Path) -> None:
    shutil.copytree(RUST, tmp_path / "rust", ignore=shutil.ignore_patterns("target"))
    source = tmp_path / "rust" / "src" / "messages.rs"
    source.write_text(source.read_text().replace("pub lookup_id: Option", "pub lookup: Option"))
    done = run(sys.executable, "twin.py", str(GOLDEN), directory=tmp_path / "rust")
    assert done.returncode != 0
    assert "lookup_id" in done.stderr


def test_all_of_it_with_its_crates(tmp_path: Path) -> None:
    if shutil.which("cargo") is None:
        missing("cargo")
    shutil.copytree(RUST, tmp_path / "examples" / "rust", ignore=shutil.ignore_patterns("target"))
    (tmp_path / "docs").mkdir()
    shutil.copy(GOLDEN, tmp_path / "docs")
    try:
        fetched = run("cargo", "fetch", "--quiet", directory=tmp_path / "examples" / "rust", timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("crates.io does not answer: src/messages.rs and src/main.rs are not compiled here")
    if fetched.returncode:
        pytest.skip("crates.io cannot be reached: src/messages.rs and src/main.rs are not compiled here")
    done = run("cargo", "test", "--quiet", directory=tmp_path / "examples" / "rust")
    assert done.returncode == 0, done.stderr
