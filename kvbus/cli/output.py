"""stdout is data, stderr is notes. On a terminal data are tables and lines, in a pipe JSON lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

Cell = str | int | float | bool | Text | None

PIPE_WIDTH = 200

_encoder = msgspec.json.Encoder()


class Column(msgspec.Struct, Generic[T], frozen=True):
    """One column of a table: its title, what it shows of a row, and how."""

    title: str
    show: Callable[[T], Cell]
    right: bool = False
    wrap: bool = False


def printable(text: str) -> str:
    """Text from the bus, fit for a terminal: control characters, which could drive it, are shown escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def styled(text: str, style: str = "") -> Text:
    """A piece of a line or of a table. Never parsed as markup."""
    return Text(printable(text), style=style)


def plain(data: object) -> Any:
    """JSON-ready data of a struct."""
    return msgspec.to_builtins(data, str_keys=True) if isinstance(data, msgspec.Struct) else data


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process here, with 1; a pipe that was closed on purpose is no error."""
        raise BrokenPipeError


class Output:
    """Where a command's answer goes. as_json: None decides by whether stdout is a terminal."""

    def __init__(self, as_json: bool | None = None) -> None:
        self.as_json = not sys.stdout.isatty() if as_json is None else as_json
        self._console: Console | None = None
        self._notes: Console | None = None
        self._passing = False

    @property
    def console(self) -> Console:
        """stdout, for people."""
        if self._console is None:
            # A table in a file or a pipe has no terminal whose width it must keep to.
            width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
            self._console = _Console(file=sys.stdout, width=width, soft_wrap=False, highlight=False, emoji=False)
        return self._console

    @property
    def notes(self) -> Console:
        """stderr, for people."""
        if self._notes is None:
            self._notes = _Console(file=sys.stderr, highlight=False, emoji=False, soft_wrap=True)
        return self._notes

    def emit(self, data: object) -> None:
        """One JSON line, at once: a reader in a pipe must not wait for a buffer to fill."""
        self.clear()
        sys.stdout.write(_encoder.encode(plain(data)).decode() + "\n")
        sys.stdout.flush()

    def line(self, data: object, text: RenderableType) -> None:
        """One thing: a JSON line in a pipe, a line of text on a terminal."""
        if self.as_json:
            self.emit(data)
        else:
            self.show(text)

    def show(self, text: RenderableType) -> None:
        """Something for a terminal."""
        self.clear()
        self.console.print(text, soft_wrap=True)

    def table(self, rows: Iterable[T], columns: Sequence[Column[T]], *, empty: str = "") -> None:
        """All rows: JSON lines in a pipe, a table on a terminal. empty: the note when there are none."""
        found = list(rows)
        if self.as_json:
            for row in found:
                self.emit(row)
        elif found:
            self.clear()
            self.console.print(make_table(found, columns))
        if not found and empty:
            self.note(empty)

    def note(self, text: str, style: str = "dim") -> None:
        """Something for the person at the terminal, never for the next program in the pipe."""
        self.clear()
        self.notes.print(styled(text, style))

    def passing(self, text: str) -> None:
        """How far it is, on the terminal behind stderr; whatever is written next takes its place.

        Not rich's own status: while that is shown, it sends what is written to stdout to stderr.
        """
        if self.notes.is_terminal and not self.notes.is_dumb_terminal:
            sys.stderr.write(f"\r\x1b[2K{printable(text)}")
            sys.stderr.flush()
            self._passing = True

    def clear(self) -> None:
        """Take away what `passing` has left."""
        if self._passing:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._passing = False

    def close_quietly(self) -> None:
        """After the reader of our pipe has gone: nothing more is written, nor complained about at exit."""
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def make_table(rows: Iterable[T], columns: Sequence[Column[T]]) -> Table:
    """A table; a column in which no row has anything to say is left out."""
    cells = [[_cell(column.show(row)) for column in columns] for row in rows]
    shown = [place for place in range(len(columns)) if any(row[place].plain not in ("", "-") for row in cells)]
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for place in shown:
        column = columns[place]
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.wrap,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*(row[place] for place in shown))
    return table


def _cell(value: Cell) -> Text:
    if isinstance(value, Text):
        return value
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, int):
        return Text(f"{value:,}")
    if isinstance(value, float):
        return Text(f"{value:,.1f}")
    return styled(value)
