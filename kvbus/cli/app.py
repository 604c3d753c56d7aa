"""The command line, put together."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any

import typer

from kvbus import __version__
from kvbus.cli.common import COMMON_OPTIONS, Common

COMMANDS = ("tail", "send", "workers", "lag", "doctor", "top", "explain", "record", "dead", "admin", "serve", "errors")
"""Modules of kvbus.cli, in the order of `kvbus --help`; each has `register(app)`."""
SUB_APPS = ("memory", "spec")
"""Modules of kvbus.cli that bring an `app` of their own, shown under their name."""


def build() -> typer.Typer:
    """The whole program as a typer app."""
    app = typer.Typer(
        name="kvbus",
        help="See, drive, replay and repair the bus between a memory system and an engine's KV cache.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_root())
    for name in COMMANDS:
        importlib.import_module(f"kvbus.cli.{name}").register(app)
    for name in SUB_APPS:
        if importlib.util.find_spec(f"kvbus.cli.{name}") is not None:
            app.add_typer(importlib.import_module(f"kvbus.cli.{name}").app, name=name)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvbus {__version__}")
        raise typer.Exit


def _root() -> Any:
    def root(ctx: typer.Context, **values: Any) -> None:
        values.pop("version", None)
        ctx.obj = Common(**values)

    import inspect

    version = Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ]
    options = COMMON_OPTIONS | {"version": version}
    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Common(), name, False), annotation=annotation
        )
        for name, annotation in options.items()
    ]
    root.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    root.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return root


def run() -> None:
    """Parse the arguments, do the work, and end the process with its exit code."""
    build()(prog_name="kvbus")
