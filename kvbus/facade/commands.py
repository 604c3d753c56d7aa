"""POST /memory/prefetch, /memory/evict, /memory/lookup."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kvbus.aio import AsyncHandle
from kvbus.answers import CommandState
from kvbus.facade import replies
from kvbus.facade.bodies import parse_command, read_body
from kvbus.facade.documents import answers, command_body
from kvbus.facade.errors import reply
from kvbus.facade.models import EvictReply, Failure, FailuresReply, LookupReply, PrefetchReply
from kvbus.facade.parts import parts
from kvbus.facade.service import Facade
from kvbus.protocol.commands import Command, Lookup, Prefetch

router = APIRouter(prefix="/memory")
LARGE_BODY = 64 * 1024
"""A body larger than this is parsed in a thread, so that the loop goes on."""
MAX_WAIT_S = 300.0
ERRORS = (400, 413, 500, 503)


@router.post(
    "/prefetch",
    responses=answers(PrefetchReply, "The command is on the bus.", *ERRORS),
    openapi_extra=command_body("prefetch"),
)
async def prefetch(request: Request, wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0) -> Response:
    """Bring chunks into DDR on every worker. Answers as soon as the command is on the bus, or with `wait` when done."""
    facade, command = await _command(request, "prefetch")
    assert isinstance(command, Prefetch)
    assert command.lookup_id is not None
    handle = await _send(request, facade, command)
    started = PrefetchReply(
        status="prefetch_started",
        lookup_id=command.lookup_id,
        num_chunks=len(command.chunk_hashes),
        command_id=handle.command_id,
    )
    if not wait:
        return reply(started)
    state = await facade.wait(handle, wait, final=True)
    failures = replies.failures(state, wait, silent=False)
    if failures:
        return _failed(handle, state, failures)
    return reply(
        msgspec.structs.replace(
            started,
            complete=state.complete,
            workers=replies.workers(state.answers.values()),
            waiting=state.waiting,
        )
    )


@router.post(
    "/evict",
    responses=answers(EvictReply, "Every live worker has answered.", *ERRORS),
    openapi_extra=command_body("evict"),
)
async def evict(request: Request) -> Response:
    """Remove chunks from the named tiers, or from all, on every worker. Answers when every live worker has."""
    facade, command = await _command(request, "evict")
    handle = await _send(request, facade, command)
    seconds = facade.settings.rest_wait_ms / 1000
    state = await facade.wait(handle, seconds)
    failures = replies.failures(state, seconds)
    if failures:
        return _failed(handle, state, failures)
    given = state.answers.values()
    removed = replies.num_evicted(given)
    request.state.counts["evicted"] = removed
    return reply(
        EvictReply(
            status="success",
            num_evicted=removed,
            command_id=handle.command_id,
            workers=replies.workers(given),
            in_use=replies.num_in_use(given),
            absent=state.absent,
        )
    )


@router.post(
    "/lookup",
    responses=answers(LookupReply, "Every live worker has answered.", *ERRORS),
    openapi_extra=command_body("lookup"),
)
async def lookup(request: Request) -> Response:
    """Tell which tiers hold each chunk, on every worker. Changes nothing."""
    facade, command = await _command(request, "lookup")
    assert isinstance(command, Lookup)
    handle = await _send(request, facade, command)
    seconds = facade.settings.rest_wait_ms / 1000
    state = await facade.wait(handle, seconds)
    failures = replies.failures(state, seconds)
    if failures:
        return _failed(handle, state, failures)
    return reply(
        LookupReply(
            status="success",
            num_chunks=len(command.chunk_hashes),
            command_id=handle.command_id,
            workers=replies.workers(state.answers.values(), looked_up=command),
            absent=state.absent,
        )
    )


async def _command(request: Request, kind: str) -> tuple[Facade, Command]:
    raw = await read_body(request)
    command = await asyncio.to_thread(parse_command, kind, raw) if len(raw) > LARGE_BODY else parse_command(kind, raw)
    request.state.counts = {"chunks": len(getattr(command, "chunk_hashes", ()))}
    return parts(request).facade, command


async def _send(request: Request, facade: Facade, command: Command) -> AsyncHandle:
    here = parts(request)
    handle = await facade.send(command)
    here.book.remember(handle)
    here.metrics.commands.labels(command.TYPE).inc()
    request.state.command_id = handle.command_id
    return handle


def _failed(handle: AsyncHandle, state: CommandState, failures: dict[str, Failure]) -> Response:
    good = [answer for name, answer in state.answers.items() if name not in failures]
    return reply(
        FailuresReply(
            error="Some workers failed to process request",
            failures=failures,
            command_id=handle.command_id,
            workers=replies.workers(good),
        ),
        500,
    )
