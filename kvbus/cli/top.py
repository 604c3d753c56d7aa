"""kvbus top"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from kvbus.cli.common import Cli, command
from kvbus.cli.lag import COLUMNS as LAG_COLUMNS
from kvbus.cli.live import repeat
from kvbus.cli.output import Column, make_table, styled
from kvbus.cli.show import STREAM_STYLE, bytes_size
from kvbus.ops.top import Snapshot, StreamRate, Top
from kvbus.ops.when import clock_text, id_ms, parse_span_ms
from kvbus.ops.workers import WorkerView


def register(app: typer.Typer) -> None:
    command(app, "top", examples=("kvbus top", "kvbus top --once --json", "kvbus top --every 5s"))(top_command)


def top_command(
    cli: Cli,
    every: Annotated[str, typer.Option("--every", metavar="SPAN", help="How often to look.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """One live screen: rates, lag, workers with their tiers, the last errors. Ctrl-C ends it."""
    every_s = max(0.1, parse_span_ms(every) / 1000)
    with cli.bus() as bus:
        top = Top(bus)
        if once:
            snapshot = top.take()
            cli.out.line(snapshot, screen(cli, snapshot))
            return
        repeat(
            cli, top.take, lambda taken: screen(cli, taken), lambda taken: [taken], every_s=every_s, full_screen=True
        )


STREAM_COLUMNS: list[Column[StreamRate]] = [
    Column("stream", lambda s: styled(s.stream, STREAM_STYLE[s.stream])),
    Column("per second", lambda s: s.per_s, right=True),
    Column("entries", lambda s: s.length, right=True),
    Column("ever added", lambda s: s.added, right=True),
]


def screen(cli: Cli, taken: Any) -> RenderableType:
    """The whole screen."""
    snapshot: Snapshot = taken
    rates = snapshot.rates
    alive = sum(worker.alive for worker in snapshot.workers)
    head = Text.assemble(
        ("kvbus ", "bold"),
        f"{cli.settings.namespace}  ",
        (clock_text(snapshot.at_ms), "dim"),
        f"  {alive} of {len(snapshot.workers)} workers alive, "
        f"{sum(publisher.alive for publisher in snapshot.publishers)} publishers",
    )
    worker_columns: list[Column[WorkerView]] = [
        Column("worker", lambda w: styled(w.name, "bold" if w.alive else "red")),
        Column("tiers", lambda w: ", ".join(w.registration.tiers), wrap=True),
        Column("loaded/s", lambda w: rates.get(w.name, {}).get("chunks_loaded"), right=True),
        Column("evicted/s", lambda w: rates.get(w.name, {}).get("chunks_evicted"), right=True),
        Column("moved/s", lambda w: _moved(rates.get(w.name, {})), right=True),
        Column("in hand", lambda w: _whole(w, "pending"), right=True),
        Column("waiting", lambda w: _whole(w, "prefetches_waiting"), right=True),
        Column("deferred", lambda w: _whole(w, "evicts_deferred"), right=True),
        Column("busy", lambda w: styled("stuck", "red") if w.stats.get("engine_stuck") else _busy(w)),
    ]
    parts: list[RenderableType] = [head, Text(), make_table(snapshot.streams, STREAM_COLUMNS)]
    if snapshot.workers:
        parts += [Text(), make_table(snapshot.workers, worker_columns)]
    if snapshot.lags:
        parts += [Text(), make_table(snapshot.lags, LAG_COLUMNS)]
    if snapshot.troubles:
        parts += [Text(), Text("last errors", style="bold")]
        parts += [
            styled(f"{clock_text(id_ms(trouble.entry_id))}  ", "dim")
            + styled(f"{trouble.what}  ", "red")
            + styled(f"{trouble.who}  {trouble.detail}")
            for trouble in reversed(snapshot.troubles)
        ]
    return Group(*parts)


def _moved(rates: dict[str, float]) -> str | None:
    return bytes_size(rates["kv_bytes"]) if "kv_bytes" in rates else None


def _whole(worker: WorkerView, name: str) -> int | None:
    return int(worker.stats[name]) if name in worker.stats else None


def _busy(worker: WorkerView) -> str | None:
    seconds = worker.stats.get("engine_busy_s")
    return None if not seconds else f"{seconds:.1f} s"
