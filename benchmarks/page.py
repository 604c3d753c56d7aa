"""Writes docs/performance.md from the numbers of the last run.

    python -m benchmarks.bench && python -m benchmarks.page

The numbers come from out/bench.json alone; the words about what holds a measure back from benchmarks/limits.md, of
which only the parts about measures that missed their target are taken.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import groups
from benchmarks.rows import Row, Skipped, number

HERE = Path(__file__).parent


class GroupedRow(Row, frozen=True, kw_only=True):
    group: str


class Report(msgspec.Struct, frozen=True):
    rows: list[GroupedRow]
    not_run: list[Skipped]
    machine: dict[str, Any]
    load: dict[str, Any]
    elapsed_s: float


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page")
    parser.add_argument("--report", type=Path, default=Path("out/bench.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/performance.md"))
    args = parser.parse_args()
    report = msgspec.json.decode(args.report.read_bytes(), type=Report)
    args.page.write_text(page(report))
    return 0


def page(report: Report) -> str:
    """The page's text."""
    parts = [_head(report)]
    for name, group in groups.ALL.items():
        rows = [row for row in report.rows if row.group == name]
        if rows:
            parts.append(f"## {group.title}\n\n{group.method}\n\n{_table(rows)}")
            notes = sorted({f"- {row.measure}: {row.note}" for row in rows if row.note})
            parts += ["\n".join(notes)] if notes else []
    if report.not_run:
        skipped = "\n".join(f"- {one.measure}: {one.why}" for one in report.not_run)
        parts.append(f"## Not run\n\n{skipped}")
    missed = [row for row in report.rows if row.ok is False]
    if missed:
        parts.append(_missed(missed))
    return "\n\n".join(parts) + "\n"


def _head(report: Report) -> str:
    machine, judged = report.machine, [row for row in report.rows if row.ok is not None]
    reached = sum(row.ok is True for row in judged)
    return f"""# Performance

Everything here was measured by one run of one program, kvbus and its peer in the same minutes on the same machine:

```
make bench                     # all of it; writes out/bench.json, out/bench.txt and plots
make performance               # this page, from out/bench.json
```

{machine["cores"]} cores ({machine["cpu"]}), {machine["system"]}, Python {machine["python"]}; the load average was
{machine["load_before"]} before the run and {machine["load_average"]} at its end, the run itself included. Rounds of
kvbus and of the peer alternate; each value is the median over {report.load["rounds"]} rounds, the lowest and the
highest round stand in brackets. `ratio` is kvbus / peer: for times and bytes less is better, for rates more. The run
took {report.elapsed_s:.0f} s{"; it was a quick one, with less of everything" if report.load["quick"] else ""}.
{reached} of {len(judged)} targets were reached; those that were not stand at the end, with what holds them back.

On a machine with other work to do the processes wait for a core more than they work, kvbus's, its server's and the
peer's alike: there look at the ratios, at p10, which is what the least disturbed calls took, and at the processor
times, which waiting does not change."""


def _table(rows: list[GroupedRow]) -> str:
    lines = ["| measure | n | kvbus | peer | unit | ratio | target | |", "|---|---:|---:|---:|---|---:|---|---|"]
    for row in rows:
        ok = {True: "reached", False: "**missed**", None: ""}[row.ok]
        ours, peer = (
            _value(row.ours, row.spread["ours"]),
            "" if row.peer is None else _value(row.peer, row.spread["peer"]),
        )
        ratio = "" if row.ratio is None else number(row.ratio)
        lines.append(f"| {row.measure} | {row.n:,} | {ours} | {peer} | {row.unit} | {ratio} | {row.target} | {ok} |")
    return "\n".join(lines)


def _value(value: float, spread: list[float]) -> str:
    low, high = (number(bound) for bound in spread)
    return number(value) if low == high else f"{number(value)} [{low}, {high}]"


def _missed(missed: list[GroupedRow]) -> str:
    """What is known of the measures that missed: the parts of limits.md whose heading begins their name."""
    parts = ["## What was not reached, and why"]
    told: set[str] = set()
    limits = _limits()
    for row in missed:
        heading = next((heading for heading in limits if row.measure.startswith(heading)), None)
        if heading is None:
            parts.append(f"### {row.measure}\n\n{number(row.ratio or row.ours)} where the target is: {row.target}.")
        elif heading not in told:
            told.add(heading)
            rows = [other for other in missed if other.measure.startswith(heading)]
            values = "; ".join(
                f"{other.measure} ({other.n}): {number(other.ratio or other.ours)}, {other.target}" for other in rows
            )
            parts.append(f"### {heading}\n\nMissed: {values}.\n\n{limits[heading]}")
    return "\n\n".join(parts)


def _limits() -> dict[str, str]:
    found: dict[str, str] = {}
    for part in (HERE / "limits.md").read_text().split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        found[heading.strip()] = text.strip()
    return found


if __name__ == "__main__":
    sys.exit(main())
