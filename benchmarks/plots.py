"""Plots of the rows as PNG files. Needs matplotlib, which only the development extra brings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, number

OURS, PEER = "#1f6f8b", "#c96f2f"


def draw(out: Path, rows: Sequence[Row]) -> list[Path]:
    """Files written; none where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for name, wanted, title in (
        ("bus-latency.png", "bus only: evict answered by all, p50", "One evict of 100 hashes, answered by all workers"),
        ("bus-rate.png", "bus only: answered everywhere", "Commands carried out and answered everywhere"),
    ):
        found = [row for row in rows if row.measure == wanted and row.peer is not None]
        if found:
            written.append(_against_workers(pyplot, out / name, found, title))
    for name, wanted, title in (
        ("scale-workers.png", "processor time of a command, everywhere", "Processor time of a command"),
        ("scale-length.png", "evict answered by all against the stream's length, p50", "Against the stream's length"),
    ):
        found = [row for row in rows if row.measure == wanted]
        if len(found) > 1:
            written.append(_line(pyplot, out / name, found, title, log="length" in name))
    judged = [row for row in rows if row.ratio is not None and row.target]
    if judged:
        written.append(_ratios(pyplot, out / "ratios.png", judged))
    return written


def _against_workers(pyplot: Any, path: Path, rows: Sequence[Row], title: str) -> Path:
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for side, label, colour, shift in (("ours", "kvbus", OURS, -0.2), ("peer", "HTTP fan-out", PEER, 0.2)):
        values = [float(getattr(row, side)) for row in rows]
        spread = [row.spread[side] for row in rows]
        errors = [
            [max(0.0, value - low) for value, (low, _) in zip(values, spread, strict=True)],
            [max(0.0, high - value) for value, (_, high) in zip(values, spread, strict=True)],
        ]
        places = [place + shift for place in range(len(rows))]
        axes.bar(places, values, 0.38, label=label, color=colour, yerr=errors, capsize=3)
    axes.set_xticks(range(len(rows)), [f"{row.n} workers" for row in rows])
    axes.set_yscale("log")
    axes.set_ylabel(rows[0].unit)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    return _save(pyplot, figure, path)


def _line(pyplot: Any, path: Path, rows: Sequence[Row], title: str, *, log: bool) -> Path:
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    axes.plot([row.n for row in rows], [row.ours for row in rows], "o-", color=OURS)
    if log:
        axes.set_xscale("log")
    axes.set_xlabel("entries" if log else "workers")
    axes.set_ylabel(rows[0].unit)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    return _save(pyplot, figure, path)


def _ratios(pyplot: Any, path: Path, rows: Sequence[Row]) -> Path:
    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(rows) + 1))
    labels = [f"{row.measure} ({row.n})" for row in rows]
    colours = [{True: OURS, False: PEER, None: "#999999"}[row.ok] for row in rows]
    axes.barh(range(len(rows)), [row.ratio for row in rows], color=colours)
    for place, row in enumerate(rows):
        axes.text(row.ratio or 0, place, f"  {number(row.ratio or 0)}, wanted: {row.target}", va="center", fontsize=6)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.6)
    axes.invert_yaxis()
    axes.set_title("ours / peer; blue: target reached", fontsize=9)
    return _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
