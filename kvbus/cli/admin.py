"""kvbus reset, kvbus trim, kvbus profiles, kvbus completion"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated, Any

import msgspec
import typer

from kvbus.cli.ask import sure
from kvbus.cli.common import Cli, command
from kvbus.cli.exits import ExitCode
from kvbus.cli.output import Column, plain, styled
from kvbus.errors import ConfigError
from kvbus.ops.admin import ResetPlan, TrimPlan, plan_reset, plan_trim, reset, trim
from kvbus.ops.profiles import load_profile, profiles_path, read_profiles
from kvbus.ops.tail import choose_streams

SHELLS = ("bash", "zsh", "fish")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be lost; change nothing.")]


def register(app: typer.Typer) -> None:
    command(app, "reset", examples=("kvbus reset memory-a --to end", "kvbus reset memory-a --to 10m --dry-run"))(
        reset_command
    )
    command(app, "trim", examples=("kvbus trim events --keep 100000", "kvbus trim results --before 2d --dry-run"))(
        trim_command
    )
    command(app, "profiles", examples=("kvbus profiles",))(profiles_command)
    command(app, "completion", examples=("kvbus completion bash > ~/.local/share/bash-completion/completions/kvbus",))(
        completion_command
    )


def reset_command(
    cli: Cli,
    reader: Annotated[str, typer.Argument(help="The reader's name, as `kvbus lag` shows it.")],
    to: Annotated[
        str, typer.Option("--to", metavar="PLACE", help="start, end, an entry id, a date or a time ago.")
    ] = "",
    forget: Annotated[bool, typer.Option("--forget", help="Forget its place: it begins like a new reader.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> ExitCode:
    """Set a named reader to another place. Says what it would skip or read again, and asks first.

    Stop the reader before: one that is running keeps its own place and writes it again.
    """
    if bool(to) == forget:
        raise ConfigError("where to?", hint="Give either --to PLACE or --forget.")
    with cli.bus() as bus:
        plan, found, target = plan_reset(bus, reader, to or "start", forget=forget)
        if dry_run:
            cli.out.line(plain(plan) | {"dry_run": True}, styled(_reset_text(plan)))
            return ExitCode.OK
        if not sure(cli, f"{_reset_text(plan)}. Go on?", yes):
            return ExitCode.WRONG
        reset(bus, plan, found, target)
    cli.out.line(plan, styled(f"done: {_reset_text(plan)}"))
    return ExitCode.OK


def _reset_text(plan: ResetPlan) -> str:
    if plan.forget:
        return f"reader {plan.reader} is forgotten: it begins anew where it is told to"
    parts = [
        f"{'very many' if count is None else format(count, ',')} entries are {what}"
        for count, what in ((plan.skipped, "never read"), (plan.repeated, "read again"))
        if count != 0
    ]
    return (
        f"reader {plan.reader} on {plan.stream}: from {plan.cursor} to {plan.to}: {' and '.join(parts) or 'no change'}"
    )


def trim_command(
    cli: Cli,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="events, commands, results or dead.")],
    keep: Annotated[int | None, typer.Option("--keep", metavar="N", min=0, help="Keep the newest N.")] = None,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="PLACE", help="Remove what is older than this id, date or time ago."),
    ] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> ExitCode:
    """Remove a stream's oldest entries for good. Says who has not read them, and asks first.

    There is no need to trim by hand: streams are capped by KVBUS_*_CAP_BYTES.
    """
    if (keep is None) == (before is None):
        raise ConfigError("what should stay?", hint="Give either --keep N or --before PLACE.")
    (name,) = choose_streams(stream) if stream != "all" else ("",)
    if not name:
        raise ConfigError("one stream at a time", hint="Name events, commands, results or dead.")
    with cli.bus() as bus:
        plan = plan_trim(bus, name, keep=keep, before=before)
        if dry_run:
            cli.out.line(plain(plan) | {"dry_run": True}, styled(_trim_text(plan)))
            return ExitCode.OK
        if plan.removed and not sure(cli, f"{_trim_text(plan)}\nRemove them for good?", yes):
            return ExitCode.WRONG
        removed = trim(bus, plan) if plan.removed else 0
    cli.out.line({"stream": name, "removed": removed}, styled(f"{removed:,} entries of {name} removed"))
    return ExitCode.OK


def _trim_text(plan: TrimPlan) -> str:
    lines = [f"{plan.removed:,} of {plan.length:,} entries of {plan.stream} would go"]
    for loser in plan.losers:
        unread = "an unknown number" if loser.unread is None else f"{loser.unread:,}"
        in_hand = f", and has {loser.in_hand} in hand" if loser.in_hand else ""
        lines.append(f"  {loser.role} {loser.name} has not read {unread} of them{in_hand}")
    return "\n".join(lines)


class ProfileView(msgspec.Struct, frozen=True):
    """One named profile; secrets struck out."""

    name: str
    chosen: bool
    settings: dict[str, Any]


PROFILE_COLUMNS: list[Column[ProfileView]] = [
    Column("profile", lambda p: styled(p.name, "bold" if p.chosen else "")),
    Column("chosen", lambda p: "yes" if p.chosen else ""),
    Column("settings", lambda p: ", ".join(f"{name}={value}" for name, value in p.settings.items()), wrap=True),
]


def profiles_command(cli: Cli) -> None:
    """List the named profiles, and where they are kept."""
    path = profiles_path()
    views = []
    for name, own in sorted(read_profiles(path).items()):
        shown = load_profile(name).shown()
        views.append(ProfileView(name, name == cli.profile, {key: shown[key] for key in own}))
    cli.out.table(views, PROFILE_COLUMNS, empty=f"no profile in {path}")
    if views:
        cli.out.note(f"from {path}")


def completion_command(
    cli: Cli, shell: Annotated[str, typer.Argument(metavar="|".join(SHELLS), help="For which shell.")]
) -> None:
    """Print the completion script for a shell. `kvbus --install-completion` installs it for the present one."""
    if shell not in SHELLS:
        raise ConfigError(f"shell {shell!r} is not known", hint=f"Use one of {', '.join(SHELLS)}.")
    # typer makes the script when the program is called with this variable; there is no public function for it.
    environment = os.environ | {"_KVBUS_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-m", "kvbus.cli.main"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    sys.stdout.write(done.stdout)
