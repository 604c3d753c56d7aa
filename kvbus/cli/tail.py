"""kvbus tail"""

from __future__ import annotations

from typing import Annotated

import typer

from kvbus.cli.common import Cli, command
from kvbus.cli.exits import ExitCode
from kvbus.cli.output import styled
from kvbus.cli.show import entry_line
from kvbus.errors import ConfigError
from kvbus.ops.entries import Filters, Seen, decoded, raw
from kvbus.ops.tail import Missed, choose_streams, tail
from kvbus.protocol.hashes import parse_hash

EXAMPLES = (
    "kvbus tail",
    "kvbus tail commands --follow",
    "kvbus tail all --last 50 --json",
    "kvbus tail results --from 10m --worker host-a/0",
    "kvbus tail events --from 2026-11-30T05:00 --session agent-7 | head -n 3",
)


def register(app: typer.Typer) -> None:
    command(app, "tail", examples=EXAMPLES)(tail_command)


def tail_command(
    cli: Cli,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="events, commands, results, dead or all.")] = "all",
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PLACE", help="start, end, an entry id (excluded), a date, or a time ago such as 10m."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--to", metavar="PLACE", help="Stop behind this id, date or time ago.")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("--last", metavar="N", min=0, help="Begin with the last N; 10 when nothing else is said."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Stop after N.")] = None,
    raw_form: Annotated[bool, typer.Option("--raw", help="The entry's fields as they stand, undecoded.")] = False,
    types: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only this type; may be repeated.")
    ] = None,
    worker: Annotated[
        list[str] | None, typer.Option("--worker", metavar="NAME", help="Only what this worker wrote.")
    ] = None,
    instance: Annotated[
        list[str] | None, typer.Option("--instance", metavar="NAME", help="Only from or for this instance.")
    ] = None,
    request: Annotated[
        list[str] | None, typer.Option("--request", metavar="ID", help="Only this request's events.")
    ] = None,
    session: Annotated[
        list[str] | None, typer.Option("--session", metavar="NAME", help="Only requests of this session.")
    ] = None,
    command_id: Annotated[
        list[str] | None, typer.Option("--command", metavar="ID", help="Only this command and its results.")
    ] = None,
    chunk: Annotated[
        list[str] | None, typer.Option("--hash", metavar="HASH", help="Only what names this chunk.")
    ] = None,
) -> ExitCode | None:
    """Show what passes over the bus: decoded, filtered, from any place, to the end or on and on.

    Steals nothing from other readers and creates nothing on the server.
    """
    streams = choose_streams(stream)
    if start is not None and last is not None:
        raise ConfigError("--from and --last exclude each other", hint="Give one of them.")
    if until is not None and (follow or last is not None):
        raise ConfigError("--to goes with neither --follow nor --last", hint="Give --from and --to.")
    filters = Filters(
        types=tuple(types or ()),
        workers=tuple(worker or ()),
        instances=tuple(instance or ()),
        requests=tuple(request or ()),
        sessions=tuple(session or ()),
        commands=tuple(command_id or ()),
        hashes=tuple(parse_hash(text) for text in chunk or ()),
    )
    if start is None and last is None and until is None:
        last = 10
    shown = 0
    follow = follow or start == "end"
    with cli.bus() as bus:
        items = tail(bus, streams, start=start, last=last, until=until, follow=follow, filters=filters)
        for item in items:
            if isinstance(item, Seen):
                if cli.out.as_json or raw_form:
                    data = raw(item) if raw_form else decoded(item)
                    cli.out.line(data, styled(str(data)))
                else:
                    cli.out.show(entry_line(item))
                shown += 1
                if shown == limit:
                    break
            elif isinstance(item, Missed):
                count = "an unknown number of" if item.gap.missed is None else f"{item.gap.missed:,}"
                cli.out.note(f"{item.stream}: {count} entries missed: {item.gap.reason}", "yellow")
            else:
                cli.out.note(f"the bus does not answer, trying again: {item.error}", "yellow")
    if not shown:
        cli.out.note(f"nothing found in {', '.join(streams)} of namespace {cli.settings.namespace}")
    return None
