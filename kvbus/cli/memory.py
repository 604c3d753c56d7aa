"""kvbus memory: the session ledger."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvbus.cli.common import Cli, command, stopped_by_signal
from kvbus.cli.exits import ExitCode
from kvbus.cli.output import Column, styled
from kvbus.memory.config import load_config
from kvbus.memory.ledger import Ledger
from kvbus.memory.service import MemoryService
from kvbus.ops.when import span_text
from kvbus.protocol.hashes import format_hash
from kvbus.streams.connection import Bus
from kvbus.streams.ledger_audit import audit
from kvbus.streams.ledger_store import Issued, StoredSession

app = typer.Typer(help="Who needs which chunk: the session ledger, its service and its content.", no_args_is_help=True)
GROUP = "memory"

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="KVBUS_MEMORY_FILE", metavar="TOML", help="File with [llm] and [memory] tables."),
]
TenantOption = Annotated[str, typer.Option("--tenant", help="Whose session or intent it is.")]


@app.callback()
def _group() -> None:
    pass


def run(
    cli: Cli,
    config: ConfigFile = None,
    name: Annotated[str | None, typer.Option("--name", help="Under which the counters are published.")] = None,
    begin: Annotated[
        str, typer.Option("--from", metavar="start|end", help="Where the first process of a namespace begins.")
    ] = "end",
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", min=0, max=65_535, help="Serve Prometheus metrics here.")
    ] = None,
) -> ExitCode:
    """Run the ledger: evict what no session needs, from events alone, until Ctrl-C. Start as many as you like."""
    # not above: every command of kvbus would wait for prometheus_client to load
    from kvbus.memory.exporter import Exporter

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    settings = cli.settings
    chosen = load_config(config, settings=settings)
    # From here on a signal only sets an event: an exception out of nowhere could leave a thread half started.
    with stopped_by_signal() as stop, cli.bus() as bus:
        service = MemoryService(bus, chosen, name=name, start=begin)
        exporter = Exporter(service.counters, metrics_port) if metrics_port is not None else None
        told = {"name": service.name, "namespace": settings.namespace, "metrics_port": exporter and exporter.port}
        where = f"; metrics on http://127.0.0.1:{exporter.port}/metrics" if exporter else ""
        cli.out.line(told, styled(f"memory service {service.name} in namespace {settings.namespace}{where}", "bold"))
        cli.out.note("Ctrl-C stops it.")
        try:
            with service:
                stop.wait()
                cli.out.note("stopping")
        finally:
            if exporter is not None:
                exporter.close()
    return ExitCode.OK


def sessions(
    cli: Cli,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant's.")] = None,
    last: Annotated[int, typer.Option("--last", min=1, max=100_000, help="How many, the newest.")] = 100,
) -> None:
    """List sessions, the most recently used first."""
    with cli.bus() as bus:
        now = bus.now_ms()
        found = Ledger(bus).sessions(tenant=tenant, count=last)
        columns: list[Column[StoredSession]] = [
            Column("session", lambda s: styled(s.session, "bold")),
            Column("tenant", lambda s: s.tenant),
            Column("intent", lambda s: s.intent),
            Column("chunks", lambda s: s.length, right=True),
            Column("in DDR", lambda s: s.resident or None, right=True),
            Column("running", lambda s: s.running or None, right=True),
            Column("turns", lambda s: s.turns, right=True),
            Column("used", lambda s: f"{span_text(max(0, now - s.used_ms))} ago"),
        ]
        if cli.out.as_json:
            for item in found:
                cli.out.emit(_plain(item))
        else:
            cli.out.table(found, columns)
        if not found:
            cli.out.note(f"no session in namespace {cli.settings.namespace}; `kvbus memory run` fills the ledger")


def show(cli: Cli, session: Annotated[str, typer.Argument(help="The session's name.")]) -> ExitCode:
    """Show one session and its chunks in their order."""
    with cli.bus() as bus:
        ledger = Ledger(bus)
        found = ledger.session(session)
        if found is None:
            cli.out.note(f"session {session!r} is not known")
            return ExitCode.WRONG
        chunks = [format_hash(item) for item in ledger.chunks(session)]
    head = f"{found.session}  tenant {found.tenant or '-'}  intent {found.intent or '-'}  {found.length:,} chunks"
    cli.out.line(
        {**_plain(found), "chunk_hashes": chunks}, Text("\n").join([styled(head, "bold"), *map(styled, chunks)])
    )
    return ExitCode.OK


def totals(cli: Cli) -> None:
    """Show the whole ledger in numbers."""
    with cli.bus() as bus:
        found = Ledger(bus).totals()
    cli.out.line(found, styled("\n".join(f"{name:10} {getattr(found, name):>14,}" for name in found.__struct_fields__)))


def holders(cli: Cli, chunk_hash: Annotated[str, typer.Argument(metavar="HASH", help="A chunk hash.")]) -> ExitCode:
    """List the sessions that hold a chunk (stored without tags)."""
    with cli.bus() as bus:
        ledger = Ledger(bus)
        held = ledger.held_by(chunk_hash)
        for name in ledger.holders(chunk_hash):
            cli.out.line({"session": name}, styled(name))
    cli.out.note(f"held {held} times, running requests counted")
    return ExitCode.OK if held else ExitCode.WRONG


def switch(
    cli: Cli,
    session: Annotated[str, typer.Argument(help="The session that is next.")] = "",
    intent: Annotated[str, typer.Option("--intent", help="All sessions of this intent instead.")] = "",
    tenant: TenantOption = "",
    config: ConfigFile = None,
) -> ExitCode:
    """Bring a session's chunks, or an intent's, into DDR before they are needed."""
    with cli.bus() as bus:
        found = _ledger(cli, bus, config).switch(session, intent=intent, tenant=tenant)
    _told(cli, found.commands)
    if not found.found:
        cli.out.note("no such session or intent")
        return ExitCode.WRONG
    cli.out.note(f"{found.chunks:,} chunks of {found.found:,} sessions are asked for")
    return ExitCode.OK


def close(
    cli: Cli,
    session: Annotated[str, typer.Argument(help="The session that is over.")],
    config: ConfigFile = None,
) -> ExitCode:
    """End a session: chunks that nobody else holds are evicted."""
    with cli.bus() as bus:
        found = _ledger(cli, bus, config).close(session)
    _told(cli, found.commands)
    if not found.known:
        cli.out.note(f"session {session!r} is not known")
        return ExitCode.WRONG
    cli.out.note(f"closed; it held {found.chunks:,} chunks")
    return ExitCode.OK


def check(cli: Cli) -> ExitCode:
    """Count the ledger anew from its sessions and compare. Exact while no memory service runs."""
    with cli.bus() as bus:
        found = audit(bus)
    head = f"{found.sessions:,} sessions, {found.chunks:,} chunks, {found.holds:,} holds"
    lines = [styled(f"{item.what}: stored {item.stored}, counted {item.counted}", "red") for item in found.differences]
    cli.out.line(found, Text("\n").join([styled(head, "bold"), *lines]))
    return ExitCode.WRONG if found.differences else ExitCode.OK


def _ledger(cli: Cli, bus: Bus, config: Path | None) -> Ledger:
    return Ledger(bus, load_config(config, settings=cli.settings))


def _told(cli: Cli, commands: tuple[Issued, ...]) -> None:
    for item in commands:
        told = {"form": item.form, "command_id": item.command_id, "num_chunks": len(item.chunk_hashes)}
        cli.out.line(told, styled(f"{item.form} {item.command_id} {len(item.chunk_hashes):,} chunks"))


def _plain(item: StoredSession) -> dict[str, object]:
    names = ("session", "tenant", "intent", "length", "resident", "running", "turns", "since_ms", "used_ms", "tags")
    return {name: getattr(item, name) for name in names}


command(app, "run", group=GROUP, examples=("kvbus memory run", "kvbus memory run --config agent.toml"))(run)
command(app, "sessions", group=GROUP, examples=("kvbus memory sessions --last 20",))(sessions)
command(app, "show", group=GROUP, examples=("kvbus memory show alice-1",))(show)
command(app, "totals", group=GROUP, examples=("kvbus memory totals",))(totals)
command(app, "holders", group=GROUP, takes_hashes=True, examples=("kvbus memory holders 3f5c45ecbab5e9fd",))(holders)
command(app, "switch", group=GROUP, examples=("kvbus memory switch alice-1", "kvbus memory switch --intent travel"))(
    switch
)
command(app, "close", group=GROUP, examples=("kvbus memory close alice-1",))(close)
command(app, "check", group=GROUP, examples=("kvbus memory check",))(check)
