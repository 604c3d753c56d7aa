"""kvbus send prefetch | evict | lookup | ping"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from kvbus.answers import Answer
from kvbus.cli.common import Cli, command, read_text
from kvbus.cli.exits import ExitCode
from kvbus.cli.output import styled
from kvbus.cli.show import entry_line, result_text
from kvbus.client import CommandHandle
from kvbus.errors import ConfigError
from kvbus.ops.entries import decoded, look_at
from kvbus.ops.when import parse_span_ms, span_text
from kvbus.protocol.codec import encode_entry, new_message_id, to_plain
from kvbus.protocol.commands import (
    EVICT_TTL_MS,
    LOOKUP_TTL_MS,
    PREFETCH_TTL_MS,
    Command,
    Evict,
    Lookup,
    Ping,
    Prefetch,
    Target,
)
from kvbus.protocol.hashes import ChunkHash, format_hash, parse_hash
from kvbus.protocol.results import Status

app = typer.Typer(help="Send a command to every worker, and see what each makes of it.", no_args_is_help=True)

GOOD = (Status.DONE, Status.NOT_APPLICABLE)

Hashes = Annotated[
    list[str] | None, typer.Argument(metavar="HASH", help="Chunk hashes, the most important first; - for stdin.")
]
File = Annotated[str | None, typer.Option("--file", metavar="FILE", help="Hashes from this file, too; - for stdin.")]
LookupId = Annotated[
    str | None, typer.Option("--lookup-id", metavar="NAME", help="A name of your own for it; need not be unique.")
]
TagOption = Annotated[list[str] | None, typer.Option("--tag", metavar="NAME=VALUE", help="In the chunks' own order.")]
TtlOption = Annotated[str | None, typer.Option("--ttl", metavar="SPAN", help="How long it is worth doing: 30s, 5m.")]
Models = Annotated[list[str] | None, typer.Option("--model", metavar="NAME", help="Only workers of this model.")]
Instances = Annotated[
    list[str] | None, typer.Option("--instance", metavar="NAME", help="Only workers of this instance.")
]
Ranks = Annotated[list[int] | None, typer.Option("--rank", metavar="N", help="Only workers of this rank.")]
Wait = Annotated[bool, typer.Option("--wait", help="Show every worker's answer as it comes.")]
Timeout = Annotated[str | None, typer.Option("--timeout", metavar="SPAN", help="How long to wait; the ttl by itself.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and show the command; send nothing.")]


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="send")


@command(
    app,
    "prefetch",
    group="send",
    takes_hashes=True,
    examples=(
        "kvbus send prefetch 3f5c45ecbab5e9fd -6ed9a448787a198f --wait",
        "kvbus send prefetch --file chunks.txt --source LocalDiskBackend --ttl 10s",
    ),
)
def prefetch(
    cli: Cli,
    hashes: Hashes = None,
    file: File = None,
    lookup_id: LookupId = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", metavar="TIER", help="Read only from this tier.")
    ] = None,
    tag: TagOption = None,
    ttl: TtlOption = None,
    model: Models = None,
    instance: Instances = None,
    rank: Ranks = None,
    wait: Wait = False,
    timeout: Timeout = None,
    dry_run: DryRun = False,
) -> ExitCode:
    """Bring chunks from slower tiers into DDR."""
    message = Prefetch(
        chunk_hashes=_hashes(hashes, file),
        lookup_id=lookup_id,
        sources=tuple(source) if source else None,
        tags=_tags(tag),
        ttl_ms=_ttl(ttl, PREFETCH_TTL_MS),
        target=_target(model, instance, rank),
    )
    return _send(cli, message, wait, timeout, dry_run)


@command(
    app,
    "evict",
    group="send",
    takes_hashes=True,
    examples=(
        "kvbus send evict 3f5c45ecbab5e9fd --wait",
        "kvbus tail events --session agent-7 --json | jq -r '.message.chunk_hashes[]' | kvbus send evict -",
    ),
)
def evict(
    cli: Cli,
    hashes: Hashes = None,
    file: File = None,
    lookup_id: LookupId = None,
    location: Annotated[
        list[str] | None, typer.Option("--location", metavar="TIER", help="Only from this tier.")
    ] = None,
    tag: TagOption = None,
    ttl: TtlOption = None,
    model: Models = None,
    instance: Instances = None,
    rank: Ranks = None,
    wait: Wait = False,
    timeout: Timeout = None,
    dry_run: DryRun = False,
) -> ExitCode:
    """Remove chunks from the named tiers, or from all. Chunks in use go when they are free, within the ttl."""
    message = Evict(
        chunk_hashes=_hashes(hashes, file),
        lookup_id=lookup_id,
        locations=tuple(location) if location else None,
        tags=_tags(tag),
        ttl_ms=_ttl(ttl, EVICT_TTL_MS),
        target=_target(model, instance, rank),
    )
    return _send(cli, message, wait, timeout, dry_run)


@command(app, "lookup", group="send", takes_hashes=True, examples=("kvbus send lookup 3f5c45ecbab5e9fd",))
def lookup(
    cli: Cli,
    hashes: Hashes = None,
    file: File = None,
    tag: TagOption = None,
    ttl: TtlOption = None,
    model: Models = None,
    instance: Instances = None,
    rank: Ranks = None,
    timeout: Timeout = None,
    dry_run: DryRun = False,
) -> ExitCode:
    """Ask which tiers hold each chunk, and wait for the answers. Changes nothing."""
    message = Lookup(
        chunk_hashes=_hashes(hashes, file),
        tags=_tags(tag),
        ttl_ms=_ttl(ttl, LOOKUP_TTL_MS),
        target=_target(model, instance, rank),
    )
    return _send(cli, message, True, timeout, dry_run)


@command(app, "ping", group="send", examples=("kvbus send ping", "kvbus send ping --instance host-a"))
def ping(
    cli: Cli,
    ttl: TtlOption = None,
    model: Models = None,
    instance: Instances = None,
    rank: Ranks = None,
    timeout: Timeout = None,
    dry_run: DryRun = False,
) -> ExitCode:
    """Ask every worker for a sign of life, and wait for the answers."""
    message = Ping(ttl_ms=_ttl(ttl, LOOKUP_TTL_MS), target=_target(model, instance, rank))
    return _send(cli, message, True, timeout, dry_run)


def _hashes(given: list[str] | None, file: str | None) -> tuple[ChunkHash, ...]:
    words: list[str] = []
    for word in given or ():
        words += re.split(r"[\s,]+", read_text("-").strip()) if word == "-" else [word]
    if file is not None:
        try:
            words += re.split(r"[\s,]+", read_text(file).strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"hashes file {file!r} cannot be read: {error}", hint="Name a text file.") from None
    words = [word for word in words if word]
    if not words:
        raise ConfigError("no chunk hash is given", hint="Name hashes, or --file FILE, or - to read them from stdin.")
    return tuple(dict.fromkeys(parse_hash(word) for word in words))


def _tags(given: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs = []
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--tag {text!r} is not NAME=VALUE", hint="Write it as user=alice.")
        pairs.append((name, value))
    return tuple(pairs)


def _ttl(text: str | None, default: int) -> int:
    return default if text is None else max(1, parse_span_ms(text))


def _target(model: list[str] | None, instance: list[str] | None, rank: list[int] | None) -> Target | None:
    if not (model or instance or rank):
        return None
    return Target(
        models=tuple(model) if model else None,
        instances=tuple(instance) if instance else None,
        ranks=tuple(rank) if rank else None,
    )


def _send(cli: Cli, message: Command, wait: bool, timeout: str | None, dry_run: bool) -> ExitCode:
    timeout_s = None if timeout is None else parse_span_ms(timeout) / 1000
    if dry_run:
        own_id = new_message_id()
        seen = look_at("commands", "0-0", encode_entry(message, message_id=own_id))
        cli.out.line({"dry_run": True} | decoded(seen), Text("would send  ") + entry_line(seen)[24:])
        return ExitCode.OK
    with cli.client() as client:
        handle = client.send(message)
        alive = sum(member.alive for member in handle.members)
        sent = {
            "command_id": handle.command_id,
            "entry_id": handle.entry_id,
            "type": message.TYPE,
            "chunks": len(getattr(message, "chunk_hashes", ())),
            "workers": [member.name for member in handle.members if member.alive],
        }
        if not wait:
            cli.out.line(sent, styled(f"{message.TYPE} {handle.command_id} sent to {alive} workers"))
        if not handle.members:
            cli.out.note("no worker is registered in this namespace; who comes later does not owe an answer", "yellow")
        elif not alive:
            cli.out.note(f"none of the {len(handle.members)} registered workers is alive", "yellow")
        return show_answers(cli, handle, timeout_s) if wait else ExitCode.OK


def show_answers(cli: Cli, handle: CommandHandle, timeout_s: float | None) -> ExitCode:
    """Every final answer as it comes; who has not answered at the end. WRONG unless all have, and did all."""
    expected = sum(member.alive for member in handle.members)
    good = expected > 0
    cli.out.passing(f"0 of {expected} workers have answered")
    for count, answer in enumerate(handle.answers(timeout_s), 1):
        good = good and answer.result.status in GOOD
        for data, line in _answer_lines(handle.command, answer):
            cli.out.line(data, line)
        cli.out.passing(f"{count} of {expected} workers have answered")
    cli.out.clear()
    state = handle.state
    for name in state.waiting:
        last = state.answers.get(name)
        cli.out.note(f"{name}: no final answer yet{f' ({last.result.status})' if last else ''}", "red")
    for name in state.dead:
        cli.out.note(f"{name}: died before it answered", "red")
    return ExitCode.OK if good and state.complete else ExitCode.WRONG


def _answer_lines(message: Command, answer: Answer) -> Iterable[tuple[dict[str, Any], Text]]:
    result = answer.result
    yield (
        {"worker": answer.worker, "instance": answer.instance, "rank": answer.rank} | to_plain(result)
        if result.held is None
        else {"worker": answer.worker, "instance": answer.instance, "rank": answer.rank}
        | to_plain(msgspec.structs.replace(result, held=None)),
        styled(f"{answer.worker}  ", "bold")
        + result_text(result)
        + styled(f"  {span_text(result.duration_us / 1000)}", "dim"),
    )
    if result.held is not None and isinstance(message, Lookup):
        for place, chunk in enumerate(message.chunk_hashes):
            tiers = result.held.tiers_of(place)
            yield (
                {"worker": answer.worker, "chunk": format_hash(chunk), "tiers": list(tiers)},
                styled(f"  {format_hash(chunk):>17}  ") + styled(", ".join(tiers) or "nowhere", "" if tiers else "dim"),
            )
