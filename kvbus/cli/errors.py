"""kvbus errors"""

from __future__ import annotations

import difflib
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from kvbus.cli.common import Cli, command
from kvbus.cli.exits import ExitCode, exit_code_of
from kvbus.cli.output import Column, styled
from kvbus.errors import ConfigError, KVBusError, all_errors


class ErrorView(msgspec.Struct, frozen=True):
    """One class of the tree of errors."""

    code: str
    name: str
    meaning: str
    hint: str
    exit_code: int
    parent: str


COLUMNS: list[Column[ErrorView]] = [
    Column("code", lambda e: styled(e.code, "bold")),
    Column("exit", lambda e: e.exit_code, right=True),
    Column("meaning", lambda e: e.meaning, wrap=True),
]


def known_errors() -> list[ErrorView]:
    return [_view(error) for error in all_errors()]


def _view(error: type[KVBusError]) -> ErrorView:
    return ErrorView(
        code=error.code,
        name=error.__name__,
        meaning=" ".join((error.__doc__ or "").split("\n\n")[0].split()),
        hint=error.default_hint,
        exit_code=int(exit_code_of(error)),
        parent=error.__mro__[1].__name__ if error is not KVBusError else "",
    )


def _complete_code(incomplete: str) -> list[str]:
    return [error.code for error in all_errors() if error.code.startswith(incomplete)]


def register(app: typer.Typer) -> None:
    command(app, "errors", examples=("kvbus errors", "kvbus errors bus_unavailable"))(errors_command)


def errors_command(
    cli: Cli,
    code: Annotated[str | None, typer.Argument(help="One code.", autocompletion=_complete_code)] = None,
) -> ExitCode | None:
    """List the stable error codes, or explain one: what it means and what to do next."""
    found = known_errors()
    if code is None:
        cli.out.table(found, COLUMNS)
        return None
    wanted = code.strip("[]").lower()
    for error in found:
        if error.code == wanted:
            text = Text.assemble((error.code, "bold"), f"  ({error.name}, a {error.parent or 'plain exception'})\n")
            text += Text(f"  {error.meaning}\n")
            text += Text.assemble(
                ("  next: ", "bold"), f"{error.hint}\n", ("  exit code: ", "bold"), str(error.exit_code)
            )
            cli.out.line(error, text)
            return None
    near = difflib.get_close_matches(wanted, [error.code for error in found], n=1)
    hint = f"Did you mean {near[0]}?" if near else "`kvbus errors` lists all codes."
    raise ConfigError(f"error code {code!r} is not known", hint=hint)
