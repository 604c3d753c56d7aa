"""kvbus explain chunk | command | request"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from kvbus.cli.common import Cli, command
from kvbus.cli.exits import ExitCode
from kvbus.cli.output import styled
from kvbus.cli.show import STREAM_STYLE
from kvbus.ops.explain import Holding, Moment, Timeline, explain_chunk, explain_command, explain_request, with_lookup
from kvbus.ops.tail import start_of
from kvbus.ops.when import clock_text, id_ms, parse_span_ms
from kvbus.protocol.hashes import ChunkHash, parse_hash

app = typer.Typer(help="Tell the life of a chunk, a command or a request, over all streams.", no_args_is_help=True)

LookupOption = Annotated[
    bool, typer.Option("--lookup/--no-lookup", help="Ask the live workers where it is now: sends one lookup.")
]
Timeout = Annotated[str, typer.Option("--timeout", metavar="SPAN", help="How long to wait for the live workers.")]

_BAD = (
    "missing",
    "in_use",
    "busy",
    "no_space",
    "unsupported",
    "tier_stuck",
    "failed",
    "rejected",
    "expired",
    "refused",
)


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="explain")


@command(
    app,
    "chunk",
    group="explain",
    takes_hashes=True,
    examples=("kvbus explain chunk 3f5c45ecbab5e9fd", "kvbus explain chunk -6ed9a448787a198f --from 1h"),
)
def chunk(
    cli: Cli,
    hash_text: Annotated[str, typer.Argument(metavar="HASH", help="The chunk's hash.")],
    start: Annotated[
        str | None, typer.Option("--from", metavar="PLACE", help="Only from this id, date or time ago on.")
    ] = None,
    lookup: LookupOption = True,
    timeout: Timeout = "2s",
) -> ExitCode:
    """Tell a chunk's life: announced by which requests, prefetched and evicted by whom, what each rank did."""
    wanted = parse_hash(hash_text)
    with cli.bus() as bus:
        timeline = explain_chunk(bus, wanted, after="0-0" if start is None else start_of(bus, start))
    return _tell(cli, timeline, (wanted,) if lookup else (), timeout)


@command(app, "command", group="explain", examples=("kvbus explain command 706f7b124321b2b6f714c4a530ba2a31",))
def command_(
    cli: Cli,
    name: Annotated[str, typer.Argument(metavar="ID", help="Command id, entry id, or lookup_id.")],
) -> ExitCode:
    """Tell a command's life: who sent it, what each worker answered, who has not answered and why."""
    with cli.bus() as bus:
        timeline = explain_command(bus, name)
    return _tell(cli, timeline or Timeline(subject=f"command {name}", moments=()), (), "0s")


@command(app, "request", group="explain", examples=("kvbus explain request chatcmpl-42",))
def request(
    cli: Cli,
    name: Annotated[str, typer.Argument(metavar="ID", help="vLLM's id of the request, or the client's.")],
    lookup: LookupOption = True,
    timeout: Timeout = "2s",
) -> ExitCode:
    """Tell a request's life: its announcement, the commands about its chunks, and where they are now."""
    with cli.bus() as bus:
        found = explain_request(bus, name)
    if found is None:
        return _tell(cli, Timeline(subject=f"request {name}", moments=()), (), timeout)
    timeline, chunks = found
    return _tell(cli, timeline, chunks if lookup else (), timeout)


def _tell(cli: Cli, timeline: Timeline, chunks: Sequence[ChunkHash], timeout: str) -> ExitCode:
    if chunks:
        with cli.client() as client:
            if any(member.alive for member in client.workers()):
                timeline = with_lookup(client, timeline, chunks, timeout_s=parse_span_ms(timeout) / 1000)
            else:
                cli.out.note("no worker is alive to tell where it is now", "yellow")
    if timeline.earlier:
        cli.out.note(f"{timeline.earlier:,} earlier moments are not shown")
    if not cli.out.as_json and timeline.moments:
        cli.out.console.print(styled(timeline.subject, "bold"))
    for moment in timeline.moments:
        cli.out.line(moment, _moment_line(moment))
    for data, line in _now_lines(timeline):
        cli.out.line(data, line)
    for note in timeline.notes:
        cli.out.note(note, "yellow")
    if timeline.now is not None:
        for name in timeline.silent:
            cli.out.note(f"{name} did not answer the lookup", "yellow")
    if not timeline.moments:
        cli.out.note(f"nothing is known of {timeline.subject} in namespace {cli.settings.namespace}", "yellow")
    held = any(holding.tiers for holding in timeline.now or ())
    return ExitCode.OK if timeline.moments or held else ExitCode.WRONG


def _moment_line(moment: Moment) -> Text:
    style = STREAM_STYLE[moment.stream]
    what = "red" if moment.what in _BAD else style
    line = styled(f"{clock_text(id_ms(moment.entry_id))}  ", "dim") + styled(f"{moment.what:12}", what)
    line += styled(f"  {moment.who}", "bold" if moment.stream == "results" else "")
    command_id = f"  ({moment.command_id[:12]})" if moment.command_id else ""
    return line + styled(f"  {moment.detail}" if moment.detail else "") + styled(command_id, "dim")


def _now_lines(timeline: Timeline) -> list[tuple[dict[str, Any], Text]]:
    holdings = timeline.now or ()
    if len({holding.chunk for holding in holdings}) <= 1:
        return [(_now(one), _now_head(one.worker) + styled(", ".join(one.tiers) or "in no tier")) for one in holdings]
    lines = []
    for worker in dict.fromkeys(holding.worker for holding in holdings):
        own = [holding for holding in holdings if holding.worker == worker]
        tiers = dict.fromkeys(tier for holding in own for tier in holding.tiers)
        counts = {tier: sum(tier in holding.tiers for holding in own) for tier in tiers}
        shown = ", ".join(f"{count} of {len(own)} in {tier}" for tier, count in counts.items()) or "in no tier"
        data = {"what": "now", "who": worker, "chunks": len(own), "tiers": counts}
        lines.append((data, _now_head(worker) + styled(shown)))
    return lines


def _now_head(worker: str) -> Text:
    return styled("now           ", "dim") + styled("holds       ", "magenta") + styled(f"  {worker}  ", "bold")


def _now(holding: Holding) -> dict[str, Any]:
    return {"what": "now", "who": holding.worker, "chunk": holding.chunk, "tiers": list(holding.tiers)}
