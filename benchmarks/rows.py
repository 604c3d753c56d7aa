"""What the benchmarks measure, as rows: medians, their spread over the rounds, the ratio to the peer, the target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One line of the report.

    ratio: ours to the peer's; above 1 is better for rates, below 1 for times and sizes. target: in words. ok: None
    where there is nothing to reach, or where the peer could not be measured. spread: the lowest and the highest round.
    """

    measure: str
    n: int
    ours: float
    peer: float | None
    unit: str
    ratio: float | None
    target: str
    ok: bool | None
    spread: dict[str, list[float]]
    note: str = ""


class Skipped(msgspec.Struct, frozen=True):
    """A measure that was not run, and why."""

    measure: str
    why: str


class Goal(msgspec.Struct, frozen=True):
    """What a ratio has to be: at most, at least, or nothing in particular."""

    text: str = ""
    most: float = math.inf
    least: float = -math.inf

    def met(self, ratio: float | None) -> bool | None:
        """None without a goal or a ratio."""
        if ratio is None or not self.text:
            return None
        return self.least <= ratio <= self.most


def at_most(ratio: float, text: str = "") -> Goal:
    """ours / peer at most `ratio`."""
    return Goal(text or f"at most {ratio:g} of the peer", most=ratio)


def times_lower(times: float) -> Goal:
    """A time so many times lower than the peer's."""
    return Goal(f"{times:g}x lower", most=1 / times)


def at_least(ratio: float, text: str = "") -> Goal:
    """ours / peer at least `ratio`."""
    return Goal(text or f"at least {ratio:g} of the peer", least=ratio)


def times_higher(times: float) -> Goal:
    """A rate so many times higher than the peer's."""
    return Goal(f"{times:g}x the rate", least=times)


def compared(
    measure: str,
    n: int,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    goal: Goal | None = None,
    note: str = "",
    *,
    paired: bool = False,
) -> Row:
    """A row from the values of the rounds: medians of each side. paired: both are of the same commands in each round,
    and so the ratio is the median of the rounds' ratios."""
    mine = statistics.median(ours)
    theirs = statistics.median(peer) if peer else None
    ratio = mine / theirs if theirs else None
    if paired:
        ratio = statistics.median(one / other for one, other in zip(ours, peer, strict=True))
    spread = {"ours": [min(ours), max(ours)]} | ({"peer": [min(peer), max(peer)]} if peer else {})
    goal = goal or Goal()
    return Row(measure, n, mine, theirs, unit, ratio, goal.text, goal.met(ratio), spread, note)


def limited(measure: str, n: int, values: Sequence[float], unit: str, most: float | None = None, note: str = "") -> Row:
    """A row without a peer: the median has to be at most `most`."""
    value = statistics.median(values)
    target = "" if most is None else f"at most {most:g} {unit}"
    ok = None if most is None else value <= most
    return Row(measure, n, value, None, unit, None, target, ok, {"ours": [min(values), max(values)]}, note)


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of all lie; the nearest one that was measured."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def table(rows: Sequence[Row]) -> str:
    """The rows for people, as aligned text."""
    head = ("measure", "n", "ours", "peer", "unit", "ratio", "target", "ok")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    right = {1, 2, 3, 5}
    return "\n".join(
        "  ".join(
            cell.rjust(widths[place]) if place in right else cell.ljust(widths[place])
            for place, cell in enumerate(line)
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    ok = {True: "yes", False: "MISSED", None: "-"}[row.ok]
    return (
        row.measure,
        str(row.n),
        number(row.ours),
        "-" if row.peer is None else number(row.peer),
        row.unit,
        "-" if row.ratio is None else number(row.ratio),
        row.target or "-",
        ok,
    )


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
