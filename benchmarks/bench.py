"""Everything against its peer, on the same machine, in the same minutes.

    python -m benchmarks.bench                     everything, less than 15 minutes on two idle cores
    python -m benchmarks.bench --quick             less of everything, two or three minutes
    python -m benchmarks.bench --only bus.rate     one group (bus), or one measure of it
    python -m benchmarks.bench --list              what there is

Rounds of ours and of the peer alternate, so that a busy machine hits both alike; the values are medians over the
rounds, with the lowest and the highest round beside them. Writes out/bench.json, out/bench.txt and, where matplotlib
is installed, plots. Exit code 0: all was measured (with --strict: and every target reached); 1: a target was missed;
2: usage; 3: a group failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import groups
from benchmarks.load import Load, quick
from benchmarks.plots import draw
from benchmarks.rows import Row, Skipped, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the groups and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="GROUP[.MEASURE]", help="may be given several times")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--strict", action="store_true", help="a missed target is an error")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args(arguments)
    if args.list:
        for name, group in groups.ALL.items():
            print(f"{name:10} {', '.join(group.measures):24} {group.title}")
        return 0
    wanted = _wanted(parser, args.only or [])
    logging.disable(logging.WARNING)
    grouped: dict[str, list[Row]] = {}
    load_before = round(os.getloadavg()[0], 1)
    skipped: list[Skipped] = []
    failed = False
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as directory:
        load = quick(Path(directory)) if args.quick else Load(directory=Path(directory))
        if args.rounds is not None:
            load = msgspec.structs.replace(load, rounds=args.rounds)
        for name, measures in wanted.items():
            at = time.monotonic()
            try:
                found = groups.ALL[name].run(load, _only(measures))
            except Exception as error:  # noqa: BLE001 - one group's fault must not cost the other groups' numbers
                traceback.print_exc()
                skipped.append(Skipped(name, f"failed: {type(error).__name__}: {error}"))
                failed = True
                continue
            fresh = [row for row in found if isinstance(row, Row)]
            grouped[name] = fresh
            skipped += [row for row in found if isinstance(row, Skipped)]
            print(f"\n{name}, {time.monotonic() - at:.0f} s\n{table(fresh)}", flush=True)
            # After each group: a run that is broken off keeps what it has.
            _write(args.out, _report(grouped, skipped, load, load_before, began))
    _write(args.out, _report(grouped, skipped, load, load_before, began))
    rows = [row for found in grouped.values() for row in found]
    draw(args.out, rows)
    missed = [row for row in rows if row.ok is False]
    print(f"\n{len(rows)} rows, {len(missed)} missed, {len(skipped)} not run: {args.out / 'bench.json'}")
    for one in skipped:
        print(f"not run: {one.measure}: {one.why}")
    return 3 if failed else int(args.strict and bool(missed))


def _wanted(parser: argparse.ArgumentParser, only: Sequence[str]) -> dict[str, set[str]]:
    """Groups in their order, each with the measures asked for (empty: all)."""
    if not only:
        return {name: set() for name in groups.ALL}
    chosen: dict[str, set[str]] = {}
    for text in only:
        name, _, measure = text.partition(".")
        if name not in groups.ALL or (measure and measure not in groups.ALL[name].measures):
            parser.error(f"{text!r} is not one of the measures; --list shows them")
        measures = chosen.setdefault(name, set())
        measures.update({measure} if measure else groups.ALL[name].measures)
    return {name: chosen[name] for name in groups.ALL if name in chosen}


def _only(measures: set[str]) -> Callable[[str], bool]:
    return lambda name: not measures or name in measures


def _report(
    grouped: dict[str, list[Row]], skipped: Sequence[Skipped], load: Load, load_before: float, began: float
) -> dict[str, Any]:
    return {
        "rows": [{"group": name, **msgspec.to_builtins(row)} for name, found in grouped.items() for row in found],
        "not_run": msgspec.to_builtins(skipped),
        "machine": _machine() | {"load_before": load_before},
        "load": {"rounds": load.rounds, "calls": load.calls, "seconds": load.seconds, "quick": load.quick},
        "elapsed_s": round(time.time() - began, 1),
    }


def _write(out: Path, report: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    (out / "bench.txt").write_text(table([msgspec.convert(row, Row) for row in report["rows"]]) + "\n")


def _machine() -> dict[str, Any]:
    """What the numbers were measured on. Names no host."""
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
