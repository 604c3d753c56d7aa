"""kvbus spec: the protocol as documents for machines and for other languages."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvbus.cli.common import Cli, command
from kvbus.cli.exits import ExitCode
from kvbus.cli.output import styled
from kvbus.ops import spec

app = typer.Typer(help="The protocol as AsyncAPI, OpenAPI and golden entries.", no_args_is_help=True)
GROUP = "spec"

Directory = Annotated[Path, typer.Option("--dir", help="Where the documents stand.")]


class Document(StrEnum):
    ASYNCAPI = "asyncapi"
    OPENAPI = "openapi"
    GOLDEN = "golden"


@app.callback()
def _group() -> None:
    pass


def write(cli: Cli, directory: Directory = Path("docs")) -> None:
    """Write asyncapi.json, openapi.json and golden.json, and the generated part of protocol.md."""
    changed = spec.write(directory)
    for path in changed:
        cli.out.line({"path": str(path)}, styled(str(path)))
    if not changed:
        cli.out.note(f"the documents in {directory} are up to date")


def check(cli: Cli, directory: Directory = Path("docs")) -> ExitCode:
    """Tell which documents are no longer what the types say; writes nothing."""
    changed = spec.drift(directory)
    for path in changed:
        cli.out.line({"path": str(path)}, styled(str(path), "red"))
    cli.out.note("run `kvbus spec write`" if changed else f"the documents in {directory} are up to date")
    return ExitCode.WRONG if changed else ExitCode.OK


def show(cli: Cli, document: Annotated[Document, typer.Argument(help="Which one.")]) -> None:
    """Print one document."""
    content = {"asyncapi": spec.asyncapi, "openapi": spec.openapi, "golden": spec.golden}[document.value]()
    cli.out.line(content, styled(json.dumps(content, indent=2, ensure_ascii=False)))


command(app, "write", group=GROUP, examples=("kvbus spec write", "kvbus spec write --dir docs"))(write)
command(app, "check", group=GROUP, examples=("kvbus spec check",))(check)
command(app, "show", group=GROUP, examples=("kvbus spec show asyncapi", "kvbus spec show golden | jq '.entries[0]'"))(
    show
)
