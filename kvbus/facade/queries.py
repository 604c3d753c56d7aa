"""The routes that only look: GET /memory/..., health, readiness, metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from kvbus.facade.documents import answers
from kvbus.facade.errors import reply
from kvbus.facade.events import ENTRY_ID
from kvbus.facade.models import CommandReply, HealthReply, ReadyReply, WorkersReply
from kvbus.facade.parts import parts
from kvbus.protocol.limits import MAX_TEXT

router = APIRouter()
MAX_STREAM_S = 86_400.0
Label = Annotated[str, Path(min_length=1, max_length=MAX_TEXT)]
OPEN = {"x-open": True}


@router.get(
    "/memory/commands/{command_id}", responses=answers(CommandReply, "What is known of the command.", 400, 404, 503)
)
async def command(request: Request, command_id: Label) -> Response:
    """What became of a command on every worker. Knows commands of other senders, and those of before a restart."""
    return reply(await parts(request).book.of_command(command_id))


@router.get(
    "/memory/prefetch/{lookup_id}", responses=answers(CommandReply, "What is known of the command.", 400, 404, 503)
)
async def prefetch(request: Request, lookup_id: Label) -> Response:
    """What became of the latest prefetch with this lookup_id, on every worker."""
    return reply(await parts(request).book.of_lookup(lookup_id))


@router.get("/memory/workers", responses=answers(WorkersReply, "Every registered worker.", 503))
async def workers(request: Request) -> Response:
    """Who is registered, and who of them is alive."""
    return reply(await parts(request).observer.workers())


@router.get(
    "/memory/events",
    responses={
        **answers(CommandReply, "", 400, 503),
        200: {"description": "Server-sent events.", "content": {"text/event-stream": {}}},
    },
)
async def events(
    request: Request,
    last_event_id: Annotated[str, Header(pattern=f"^$|{ENTRY_ID}")] = "",
    start: Annotated[str, Query(pattern=f"{ENTRY_ID}|^(start|end)$", description="Where to begin.")] = "end",
    seconds: Annotated[float | None, Query(ge=0, le=MAX_STREAM_S, description="End the stream after so long.")] = None,
) -> Response:
    """Finished requests and the workers' own events as they come. `id` is the entry's id: resume with Last-Event-ID.

    Besides the events themselves: `kvbus.hole`, events of one publisher that never came; `kvbus.gap`, what this
    reader missed because it was trimmed away or the server lost it.
    """
    return await parts(request).events.follow(last_event_id or start, seconds)


@router.get("/healthz", responses=answers(HealthReply, "The process answers."), openapi_extra=OPEN)
async def healthz() -> Response:
    """Whether this process answers. Says nothing of the bus."""
    return reply(HealthReply(status="ok"))


@router.get(
    "/readyz",
    responses={
        **answers(ReadyReply, "Commands can be carried out, and hashes can match."),
        503: answers(ReadyReply, "Not ready; `checks` says why.")[200],
    },
    openapi_extra=OPEN,
)
async def readyz(request: Request) -> Response:
    """The server of the bus answers, at least one worker is alive, and all hash settings are the same."""
    found = await parts(request).observer.ready()
    return reply(found, 200 if found.ready else 503)


@router.get(
    "/metrics",
    responses={200: {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """The facade's own numbers, and every worker's and publisher's counters as they last reported them."""
    here = parts(request)
    await here.observer.refresh()
    return Response(generate_latest(here.metrics.registry), media_type=CONTENT_TYPE_LATEST)
