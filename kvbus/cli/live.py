"""Showing something again and again: in place on a terminal, as JSON lines in a pipe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from rich.console import RenderableType
from rich.live import Live

from kvbus.cli.common import Cli
from kvbus.cli.output import styled
from kvbus.errors import BusError


def repeat(
    cli: Cli,
    take: Callable[[], object],
    render: Callable[[object], RenderableType],
    lines: Callable[[object], Iterable[object]],
    *,
    every_s: float,
    full_screen: bool = False,
) -> None:
    """Until Ctrl-C: take a snapshot, show it. An outage of the bus is shown, and tried again."""
    pause = threading.Event()
    if cli.out.as_json:
        while True:
            try:
                for line in lines(take()):
                    cli.out.emit(line)
            except BusError as error:
                cli.out.note(f"the bus does not answer, trying again: {error}", "yellow")
            pause.wait(every_s)
    with Live(console=cli.out.console, screen=full_screen, auto_refresh=False) as live:
        while True:
            try:
                live.update(render(take()), refresh=True)
            except BusError as error:
                live.update(styled(f"the bus does not answer, trying again: {error}", "yellow"), refresh=True)
            pause.wait(every_s)
