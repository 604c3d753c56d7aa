"""kvbus lag"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from kvbus.cli.common import Cli, command
from kvbus.cli.exits import ExitCode
from kvbus.cli.live import repeat
from kvbus.cli.output import Column, make_table, styled
from kvbus.ops.lag import Lag, above, read_lag
from kvbus.ops.when import parse_span_ms, span_text

COLUMNS: list[Column[Lag]] = [
    Column("name", lambda r: styled(r.name, "dim" if r.alive is False else "bold")),
    Column("role", lambda r: _role(r)),
    Column("stream", lambda r: r.stream),
    Column("position", lambda r: r.cursor),
    Column("behind", lambda r: _behind(r), right=True),
    Column("oldest unread", lambda r: _age(r), right=True),
    Column("in hand", lambda r: _in_hand(r), wrap=True),
    Column("trouble", lambda r: styled(r.trouble, "red"), wrap=True),
]


def register(app: typer.Typer) -> None:
    command(app, "lag", examples=("kvbus lag", "kvbus lag --watch 2s", "kvbus lag --fail-above 100"))(lag_command)


def lag_command(
    cli: Cli,
    watch: Annotated[
        str | None, typer.Option("--watch", metavar="SPAN", help="Show it again every SPAN, such as 2s.")
    ] = None,
    fail_above: Annotated[
        int | None,
        typer.Option("--fail-above", metavar="N", min=0, help="Exit 1 if anyone is more than N behind, or unknown."),
    ] = None,
) -> ExitCode | None:
    """Show how far every worker and named reader is behind, and what each has in hand.

    Behind is counted in entries; "unknown" is said where it is unknown.
    """
    with cli.bus() as bus:
        if watch is not None:
            every_s = max(0.1, parse_span_ms(watch) / 1000)
            repeat(cli, lambda: read_lag(bus), _table, _lines, every_s=every_s)
        lags = read_lag(bus)
    cli.out.table(lags, COLUMNS, empty=f"no worker and no reader in namespace {cli.settings.namespace}")
    if fail_above is None:
        return None
    far = above(lags, fail_above)
    for lag in far:
        cli.out.note(f"{lag.role} {lag.name} is {_behind_text(lag)} behind on {lag.stream}", "red")
    return ExitCode.WRONG if far else ExitCode.OK


def _table(lags: Any) -> Any:
    return make_table(lags, COLUMNS)


def _lines(lags: Any) -> Any:
    return lags


def _role(lag: Lag) -> Text:
    return styled(lag.role) if lag.alive is not False else styled(f"{lag.role}, dead", "red")


def _behind_text(lag: Lag) -> str:
    return "an unknown number" if lag.behind is None else f"{lag.behind:,}"


def _behind(lag: Lag) -> Text:
    if lag.behind is None:
        return styled("unknown", "yellow")
    return styled(f"{lag.behind:,}", "green" if lag.behind == 0 else "")


def _age(lag: Lag) -> Text:
    if lag.behind == 0:
        return Text("-", style="dim")
    return styled("unknown", "yellow") if lag.oldest_unread_ms is None else styled(span_text(lag.oldest_unread_ms))


def _in_hand(lag: Lag) -> Text:
    if lag.in_flight is None:
        return Text("-", style="dim")
    item = lag.in_flight
    age = "" if item.age_ms is None else f" for {span_text(item.age_ms)}"
    attempt = f", attempt {item.attempt}" if item.attempt > 1 else ""
    more = f" and {lag.pending - 1} more" if lag.pending > 1 else ""
    return styled(f"{item.type} {item.command_id[:12]}{age}{attempt}{more}")
