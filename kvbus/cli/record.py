"""kvbus record, kvbus verify, kvbus replay"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from kvbus.cli.common import Cli, command, stopped_by_signal
from kvbus.cli.exits import ExitCode
from kvbus.cli.output import plain, styled
from kvbus.cli.show import bytes_size
from kvbus.errors import ConfigError
from kvbus.ops.entries import STREAMS
from kvbus.ops.recording import Verified, verify
from kvbus.ops.replay import DEFAULT_STREAMS, Plan, Range, Replay, from_file, from_stream, range_of
from kvbus.ops.when import clock_text, id_ms, parse_span_ms, span_text
from kvbus.settings import redact_url
from kvbus.streams.connection import Bus

TELL_EVERY_S = 0.2

From = Annotated[
    str | None, typer.Option("--from", metavar="PLACE", help="Behind this entry id, from this date, or a time ago.")
]
To = Annotated[str | None, typer.Option("--to", metavar="PLACE", help="Up to this id, date or time ago.")]


def register(app: typer.Typer) -> None:
    command(
        app,
        "record",
        examples=(
            "kvbus record run.kvrec",
            "kvbus record run.kvrec --stream commands --stream events --follow",
            "kvbus record run.kvrec --append",
        ),
    )(record_command)
    command(app, "verify", examples=("kvbus verify run.kvrec",))(verify_command)
    command(
        app,
        "replay",
        examples=(
            "kvbus replay run.kvrec --into scratch --dry-run",
            "kvbus replay run.kvrec --into scratch --speed max",
            "kvbus replay commands --from 10m --into scratch --speed 4",
            "kvbus replay run.kvrec --into scratch --resume",
        ),
    )(replay_command)


def record_command(
    cli: Cli,
    file: Annotated[Path, typer.Argument(help="The recording to make.")],
    stream: Annotated[
        list[str] | None,
        typer.Option("--stream", metavar="STREAM", help="Only this stream; may be repeated. All by itself."),
    ] = None,
    start: From = None,
    until: To = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Go on where the recording ends.")] = False,
) -> ExitCode | None:
    """Record streams into a compact file that can be verified, replayed, and kept.

    Changes nothing on the server. A recording that was interrupted is sound up to there: go on with --append.
    """
    from kvbus.ops.record import record

    for name in stream or ():
        if name not in STREAMS:
            raise ConfigError(f"stream {name!r} is not known", hint=f"Use some of {', '.join(STREAMS)}.")
    if follow and until is not None:
        raise ConfigError("--to goes not with --follow", hint="Give one of them.")
    if follow:
        cli.out.note(f"recording into {file}; Ctrl-C ends it")
    with cli.bus() as bus, stopped_by_signal() as stop:
        done = record(
            bus,
            file,
            tuple(dict.fromkeys(stream or STREAMS)),
            start=start or "start",
            until=until,
            follow=follow,
            append=append,
            progress=_progress(cli, "recorded"),
            stop=stop,
        )
    counts = ", ".join(f"{count:,} {name}" for name, count in done.entries.items())
    cli.out.line(done, styled(f"{done.path}: {done.added:,} entries recorded ({counts} in it)"))
    if done.missed:
        cli.out.note(f"{done.missed:,} entries were removed before they could be recorded", "yellow")
        return ExitCode.WRONG
    return ExitCode.INTERRUPTED if stop.is_set() else ExitCode.OK


def verify_command(cli: Cli, file: Annotated[Path, typer.Argument(help="The recording.")]) -> ExitCode:
    """Check every frame of a recording: its version, its checksums, its counts, and where it was torn.

    Exit 1 unless it is whole and was closed well.
    """
    found = verify(file)
    cli.out.line(plain(found) | {"whole": found.whole}, _verified_text(found))
    return ExitCode.OK if found.whole else ExitCode.WRONG


def _verified_text(found: Verified) -> Text:
    counts = ", ".join(f"{count:,} {name}" for name, count in found.entries.items()) or "no entries"
    saved = f", {found.file_bytes / found.raw_bytes:.0%} of the raw bytes" if found.raw_bytes else ""
    lines = [
        f"{found.path}: format {found.header.format} by kvbus {found.header.kvbus}, namespace {found.header.namespace}",
        f"  {counts}; {bytes_size(found.file_bytes)}{saved}",
    ]
    if found.last_id:
        lines.append(f"  from {clock_text(id_ms(found.first_id))} to {clock_text(id_ms(found.last_id))}")
    text = styled("")
    text.append("\n".join(lines))
    for damage in found.damaged:
        text.append(f"\n  damaged at {damage}", "red")
    if found.torn_bytes:
        text.append(f"\n  torn: the last {found.torn_bytes:,} bytes are not a whole frame", "red")
    if found.missed:
        text.append(f"\n  {found.missed:,} entries were missed while it was made", "yellow")
    text.append("\n  whole" if found.whole else "\n  not whole", "green" if found.whole else "red")
    if not found.ended and not found.torn_bytes:
        text.append(": it was not closed", "red")
    return text


def replay_command(
    cli: Cli,
    source: Annotated[str, typer.Argument(metavar="FILE|STREAM", help="A recording, or events, commands, ... or all.")],
    into: Annotated[str | None, typer.Option("--into", metavar="NAMESPACE", help="The target namespace.")] = None,
    into_url: Annotated[str | None, typer.Option("--into-url", metavar="URL", help="The target server.")] = None,
    stream: Annotated[
        list[str] | None,
        typer.Option("--stream", metavar="STREAM", help="Of a recording: only this; events and commands by itself."),
    ] = None,
    start: From = None,
    until: To = None,
    speed: Annotated[
        str, typer.Option("--speed", metavar="FACTOR|max", help="1 is the original pace, max is at once.")
    ] = "1",
    max_pause: Annotated[
        str, typer.Option("--max-pause", metavar="SPAN", help="The longest wait between two entries.")
    ] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would be written; write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even into a namespace with live workers.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted replay of the same.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin an interrupted replay anew.")] = False,
) -> ExitCode | None:
    """Write a recording's entries, or a stream's, once more: into another namespace or onto another server.

    They keep their content, get new ids and issue times, and name the original in `origin`. Refuses a namespace
    with live workers unless forced. One that was interrupted goes on with --resume, without a repeat.
    """
    factor = _speed(speed)
    target_settings = cli.settings
    if into is not None:
        target_settings = msgspec.structs.replace(target_settings, namespace=into)
    if into_url is not None:
        target_settings = msgspec.structs.replace(target_settings, redis_url=into_url)
    is_stream = source in STREAMS or source == "all"
    if is_stream and target_settings == cli.settings and not force:
        raise ConfigError(
            f"{source} would be replayed into its own namespace {cli.settings.namespace}",
            hint="Name another with --into, or give --force if that is what you want.",
        )
    target = Bus(target_settings, client_name="kvbus-cli-replay")
    try:
        with cli.bus() as bus:
            names = STREAMS if source == "all" else (source,) if is_stream else tuple(stream or DEFAULT_STREAMS)
            chosen = range_of(bus if is_stream else target, names, start, until)
            found = from_stream(bus, chosen) if is_stream else from_file(Path(source), chosen)
            replay = Replay(found, target)
            if dry_run:
                plan = replay.plan()
                cli.out.line(plain(plan) | {"dry_run": True}, _plan_text(plan, factor, into_url))
                return None
            with stopped_by_signal() as stop:
                done = replay.run(
                    speed=factor,
                    force=force,
                    resume=resume,
                    restart=restart,
                    max_pause_ms=parse_span_ms(max_pause),
                    progress=_progress(cli, "replayed"),
                    stop=stop,
                )
    finally:
        target.close()
    earlier = f" ({done.earlier:,} were before)" if done.earlier else ""
    cli.out.line(done, styled(f"{done.written:,} entries replayed into {done.into}{earlier} in {done.seconds:.1f} s"))
    if done.refused:
        cli.out.note(f"{done.refused:,} entries cannot be decoded and were not replayed", "yellow")
    if stop.is_set():
        ids = "".join(f" {option} {place}" for option, place in _range_ids(chosen, start, until))
        cli.out.note(f"interrupted; go on from here with the same command and{ids} --resume", "yellow")
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def _range_ids(chosen: Range, start: str | None, until: str | None) -> list[tuple[str, str]]:
    """The range as ids: "10m" would name another place the next time."""
    given = [("--from", start, chosen.after), ("--to", until, chosen.until)]
    return [
        (option, place) for option, text, place in given if text is not None and place is not None and text != place
    ]


def _speed(text: str) -> float | None:
    if text in ("max", "0"):
        return None
    try:
        factor = float(text)
        if factor > 0:
            return factor
    except ValueError:
        pass
    raise ConfigError(f"--speed {text!r} is not a factor", hint="Write 1, 0.5, 10, or max for at once.")


def _plan_text(plan: Plan, factor: float | None, into_url: str | None) -> Text:
    where = plan.into + (f" on {redact_url(into_url)}" if into_url else "")
    takes = "at once" if factor is None else f"over {span_text(plan.span_ms / factor)}"
    text = styled(f"would write {plan.total:,} entries of {plan.source} into {where}, {takes}")
    for name, count in sorted(plan.counts.items()):
        text.append(f"\n  {count:>9,}  {name}")
    if plan.refused:
        text.append(f"\n  {plan.refused:>9,}  cannot be decoded, not replayed", "yellow")
    if plan.live_workers:
        text.append(f"\n  needs --force: {len(plan.live_workers)} live workers there", "red")
    if plan.unfinished is not None:
        text.append(f"\n  needs --resume or --restart: {plan.unfinished:,} entries were written before", "yellow")
    return text


def _progress(cli: Cli, verb: str) -> Callable[[int], None]:
    """A counter on the terminal, a few times a second."""
    told_at = 0.0

    def tell(count: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > TELL_EVERY_S:
            cli.out.passing(f"{count:,} {verb}")
            told_at = time.monotonic()

    return tell
