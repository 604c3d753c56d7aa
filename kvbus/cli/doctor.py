"""kvbus doctor"""

from __future__ import annotations

import typer

from kvbus.cli.common import Cli, command
from kvbus.cli.exits import ExitCode
from kvbus.cli.output import styled
from kvbus.errors import BusUnavailable
from kvbus.ops.doctor import Level, examine

STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red", Level.SKIP: "dim"}


def register(app: typer.Typer) -> None:
    command(app, "doctor", examples=("kvbus doctor", "kvbus doctor --json | jq -c 'select(.level != \"ok\")'"))(
        doctor_command
    )


def doctor_command(cli: Cli) -> ExitCode:
    """Look at everything: the server, the streams, readers, workers, hashes, versions. Each line says what mends it.

    Exit 1 when something fails, 3 when the server cannot be reached.
    """
    levels: dict[Level, int] = dict.fromkeys(Level, 0)
    unreachable = False
    for finding in examine(cli.settings):
        levels[finding.level] += 1
        unreachable = unreachable or (finding.probe == "reachable" and finding.code == BusUnavailable.code)
        line = styled(f"{finding.level:4}  ", STYLE[finding.level]) + styled(f"{finding.probe:14}", "bold")
        line += styled(f"  {finding.evidence}")
        if finding.mend:
            line.append("\n" + " " * 22).append_text(styled(f"mend: {finding.mend}", "cyan"))
        cli.out.line(finding, line)
    told = ", ".join(f"{count} {level}" for level, count in levels.items() if count)
    cli.out.note(told)
    if unreachable:
        return ExitCode.UNREACHABLE
    return ExitCode.WRONG if levels[Level.FAIL] else ExitCode.OK
