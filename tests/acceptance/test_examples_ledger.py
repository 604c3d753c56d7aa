"""The ledger's demo, on four real ranks: what it claims in its table must hold wherever it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_table_holds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo_ledger"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "demo_ledger.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["ledger"]["ddr"] == rows["ledger"]["asked"] > rows["plain LRU"]["ddr"]
    assert rows["own difference"]["lost"] > 0
