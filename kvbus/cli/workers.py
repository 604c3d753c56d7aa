"""kvbus workers"""

from __future__ import annotations

import typer

from kvbus.cli.common import Cli, command
from kvbus.cli.output import Column, styled
from kvbus.ops.when import span_text
from kvbus.ops.workers import PublisherView, WorkerView, list_publishers, list_workers

WORKER_COLUMNS: list[Column[WorkerView]] = [
    Column("worker", lambda w: styled(w.name, "bold" if w.alive else "dim")),
    Column("alive", lambda w: styled("yes", "green") if w.alive else styled("no", "red")),
    Column("model", lambda w: w.registration.model),
    Column("rank", lambda w: f"{w.registration.rank} of {w.registration.world_size}"),
    Column("tiers", lambda w: ", ".join(w.registration.tiers), wrap=True),
    Column("up for", lambda w: span_text(w.age_ms) if w.age_ms is not None and w.alive else None),
    Column("versions", lambda w: _versions(w), wrap=True),
    Column("process", lambda w: f"{w.registration.host}:{w.registration.pid}", wrap=True),
]
PUBLISHER_COLUMNS: list[Column[PublisherView]] = [
    Column("publisher", lambda p: styled(p.name, "bold" if p.alive else "dim")),
    Column("alive", lambda p: styled("yes", "green") if p.alive else styled("no", "red")),
    Column("model", lambda p: p.model),
    Column("epoch", lambda p: str(p.epoch)),
    Column("events", lambda p: p.next_seq, right=True),
    Column("process", lambda p: f"{p.host}:{p.pid}"),
]


def register(app: typer.Typer) -> None:
    command(app, "workers", examples=("kvbus workers", "kvbus workers --json | jq -r 'select(.alive) | .name'"))(
        workers_command
    )


def workers_command(cli: Cli) -> None:
    """Show who is registered and alive: workers, and the publishers of events."""
    with cli.bus() as bus:
        workers, publishers = list_workers(bus), list_publishers(bus)
    cli.out.table(workers, WORKER_COLUMNS, empty=f"no worker is registered in namespace {cli.settings.namespace}")
    cli.out.table(publishers, PUBLISHER_COLUMNS)


def _versions(worker: WorkerView) -> str:
    own = worker.registration
    parts = {"kvbus": own.kvbus, "lmcache": own.lmcache, "vllm": own.vllm}
    return " ".join(f"{name} {version}" for name, version in parts.items() if version)
