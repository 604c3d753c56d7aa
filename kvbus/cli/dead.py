"""kvbus dead list | show | requeue | drop"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

import typer
from rich.text import Text

from kvbus.cli.ask import sure
from kvbus.cli.common import Cli, command
from kvbus.cli.exits import ExitCode
from kvbus.cli.output import Column, styled
from kvbus.errors import ConfigError, KVBusError
from kvbus.ops.dead import Dead, check, drop, find_dead, list_dead, requeue
from kvbus.ops.entries import bytes_text
from kvbus.ops.when import clock_text, id_ms
from kvbus.protocol.codec import to_plain

app = typer.Typer(help="Look at what was refused, send it again, or drop it.", no_args_is_help=True)

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="The letter's entry id, or the id of the message that was refused."),
]
Code = Annotated[str | None, typer.Option("--code", metavar="CODE", help="Only those refused with this error code.")]
By = Annotated[str | None, typer.Option("--by", metavar="WORKER", help="Only those that this worker refused.")]
All = Annotated[bool, typer.Option("--all", help="All of them, or all that --code and --by leave.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

COLUMNS: list[Column[Dead]] = [
    Column("entry", lambda d: styled(d.entry_id, "bold")),
    Column("refused at", lambda d: clock_text(d.letter.at_ms or id_ms(d.entry_id))),
    Column("stream", lambda d: d.letter.stream.rpartition(":")[2]),
    Column("type", lambda d: d.letter.type),
    Column("code", lambda d: styled(d.letter.code, "red")),
    Column("by", lambda d: d.letter.refused_by),
    Column("bytes", lambda d: d.letter.size, right=True),
    Column("why", lambda d: d.letter.message, wrap=True),
]


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="dead")


@command(app, "list", group="dead", examples=("kvbus dead list", "kvbus dead list --code undecodable --last 5"))
def list_(
    cli: Cli,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="At most the newest N.")] = 100,
    code: Code = None,
    by: By = None,
) -> None:
    """List dead letters, the newest last."""
    with cli.bus() as bus:
        found = list(islice(list_dead(bus, code=code, by=by), last))[::-1]
    if cli.out.as_json:
        for one in found:
            cli.out.emit(_data(one))
    else:
        cli.out.table(found, COLUMNS)
    if not found:
        cli.out.note(f"no dead letter in namespace {cli.settings.namespace}")


@command(app, "show", group="dead", examples=("kvbus dead show 1764480000000-0",))
def show(
    cli: Cli,
    name: Annotated[
        str, typer.Argument(metavar="ID", help="The letter's entry id, or the id of the message that was refused.")
    ],
) -> None:
    """Show one dead letter: who refused what and why, its raw fields, and whether it could be sent again."""
    with cli.bus() as bus:
        found = find_dead(bus, name)
        try:
            check(bus, found)
            verdict = "it can be requeued"
        except KVBusError as error:
            verdict = f"it cannot be requeued as it is: {error}"
    letter = found.letter
    text = Text.assemble((f"[{letter.code}] ", "red"), letter.message, "\n")
    for label, value in (
        ("refused by", f"{letter.refused_by}, {clock_text(letter.at_ms or id_ms(found.entry_id))}"),
        ("stood in", f"{letter.stream} at {letter.entry_id}, message {letter.message_id}"),
        ("size", f"{letter.size:,} bytes" + ("" if found.whole else f", {found.kept_bytes:,} of them kept")),
    ):
        text.append_text(styled(f"  {label:11}", "dim")).append_text(styled(value)).append("\n")
    for field, raw in letter.fields.items():
        text.append_text(styled(f"  {field:11}", "cyan")).append_text(styled(bytes_text(raw)[:2000])).append("\n")
    text.append_text(styled(f"  {verdict}"))
    cli.out.line(_data(found) | {"verdict": verdict}, text)


@command(
    app,
    "requeue",
    group="dead",
    examples=("kvbus dead requeue 1764480000000-0", "kvbus dead requeue --all --code poison --dry-run"),
)
def requeue_(
    cli: Cli,
    ids: Ids = None,
    every: All = False,
    code: Code = None,
    by: By = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check each, send none.")] = False,
) -> ExitCode:
    """Send refused entries again: with a new message id and issue time, naming the original, checked like any other.

    One that still cannot be taken stays where it is; exit 1 then.
    """
    good = True
    with cli.client() as client:
        for found in _chosen(cli, ids, every, code, by):
            try:
                if dry_run:
                    envelope = check(client.bus, found)
                    data: Any = {"dead_id": found.entry_id, "type": envelope.type, "dry_run": True}
                    cli.out.line(data, styled(f"{found.entry_id}: a {envelope.type}, can be requeued"))
                else:
                    done = requeue(client, found)
                    cli.out.line(done, styled(f"{done.dead_id}: {done.type} sent again as {done.id}"))
            except KVBusError as error:
                if not isinstance(error, ConfigError) and error.code.startswith("bus"):
                    raise
                good = False
                cli.fail(error)
    return ExitCode.OK if good else ExitCode.WRONG


@command(app, "drop", group="dead", examples=("kvbus dead drop 1764480000000-0", "kvbus dead drop --all --yes"))
def drop_(
    cli: Cli, ids: Ids = None, every: All = False, code: Code = None, by: By = None, yes: Yes = False
) -> ExitCode:
    """Remove dead letters for good. Asks first."""
    chosen = _chosen(cli, ids, every, code, by)
    if not chosen or not sure(cli, f"Drop {len(chosen)} dead letters for good?", yes):
        return ExitCode.OK if not chosen else ExitCode.WRONG
    with cli.bus() as bus:
        dropped = sum(drop(bus, found.entry_id) for found in chosen)
    cli.out.line({"dropped": dropped}, styled(f"{dropped} dead letters dropped"))
    return ExitCode.OK


def _chosen(cli: Cli, ids: list[str] | None, every: bool, code: str | None, by: str | None) -> list[Dead]:
    if bool(ids) == (every or code is not None or by is not None):
        raise ConfigError("which dead letters?", hint="Name their ids, or give --all, --code or --by.")
    with cli.bus() as bus:
        if ids:
            return [find_dead(bus, name) for name in ids]
        found = list(list_dead(bus, code=code, by=by))[::-1]
    if not found:
        cli.out.note("no dead letter fits")
    return found


def _data(found: Dead) -> dict[str, Any]:
    plain = to_plain(found.letter)
    plain["fields"] = {name: bytes_text(value) for name, value in found.letter.fields.items()}
    return {"dead_id": found.entry_id, "whole": found.whole} | plain
