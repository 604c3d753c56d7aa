"""Asking before something is lost."""

from __future__ import annotations

import sys

import typer

from kvbus.cli.common import Cli
from kvbus.errors import ConfigError


def sure(cli: Cli, question: str, yes: bool) -> bool:
    """Whether to go on. yes: the person said so beforehand. Raises ConfigError where nobody can be asked."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Nobody can be asked here.", hint="Give --yes to go on without asking.")
    if typer.confirm(question, err=True):
        return True
    cli.out.note("nothing was changed")
    return False
