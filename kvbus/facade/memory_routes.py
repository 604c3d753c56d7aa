"""The session ledger over HTTP: sessions, their switch and their end, and requests announced in advance."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvbus.errors import ConfigError, InvalidMessage
from kvbus.facade import models
from kvbus.facade.bodies import read_body
from kvbus.facade.documents import answers
from kvbus.facade.errors import Refused, reply
from kvbus.facade.memory_models import BeginReply, CloseReply, SessionInfo, SessionsReply, SwitchReply
from kvbus.facade.parts import parts
from kvbus.memory.config import load_config
from kvbus.memory.ledger import Begun, Ledger
from kvbus.protocol.codec import parse_json_object
from kvbus.protocol.hashes import format_hash
from kvbus.protocol.limits import MAX_TEXT
from kvbus.streams.ledger_store import StoredSession

router = APIRouter(prefix="/memory")
Name = Annotated[str, Path(min_length=1, max_length=MAX_TEXT)]
Tenant = Annotated[str, Query(max_length=MAX_TEXT, description="Whose session it is.")]
MAX_PAGE = 1_000

_TEXT = {"type": "string", "maxLength": MAX_TEXT}
_NULL = {"type": "null"}
_BEGIN: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["request_id"],
                    "properties": {
                        "request_id": {**_TEXT, "minLength": 1},
                        "session": {"anyOf": [_TEXT, _NULL]},
                        "intent": {"anyOf": [_TEXT, _NULL]},
                        "tenant": {"anyOf": [_TEXT, _NULL]},
                        "chunk_hashes": {"anyOf": [{**models.CHUNK_HASHES, "minItems": 0}, _NULL]},
                    },
                    "anyOf": [
                        {"required": ["session"], "properties": {"session": {"type": "string", "minLength": 1}}},
                        {
                            "required": ["chunk_hashes"],
                            "properties": {"chunk_hashes": {"type": "array", "minItems": 1}},
                        },
                    ],
                }
            }
        },
    }
}
"""A session, or chunk_hashes, or both."""


@router.get("/sessions", responses=answers(SessionsReply, "The newest sessions.", 400, 503))
async def sessions(
    request: Request,
    tenant: Annotated[str | None, Query(max_length=MAX_TEXT)] = None,
    first: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
    count: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> Response:
    """The sessions of the ledger, the most recently used first, and the ledger in numbers."""
    ledger = _ledger(request)
    found = await parts(request).facade.ask(lambda: ledger.sessions(tenant=tenant, first=first, count=count))
    totals = await parts(request).facade.ask(ledger.totals)
    return reply(
        SessionsReply(
            sessions=tuple(_info(item) for item in found),
            total=totals.sessions,
            chunks=totals.chunks,
            resident=totals.resident,
            running=totals.running,
            doomed=totals.doomed,
        )
    )


@router.get("/sessions/{session}", responses=answers(SessionInfo, "The session and its chunks.", 400, 404, 503))
async def session(request: Request, session: Name) -> Response:
    """One session, with its chunks in their order."""
    ledger = _ledger(request)
    found = await parts(request).facade.ask(lambda: ledger.session(session))
    if found is None:
        raise Refused(404, f"session {session!r} is not known")
    chunks = await parts(request).facade.ask(lambda: ledger.chunks(session))
    return reply(_info(found, tuple(format_hash(item) for item in chunks)))


@router.api_route(
    "/sessions/{session}", methods=["OPTIONS", "HEAD", "POST", "PUT", "PATCH", "TRACE"], include_in_schema=False
)
async def session_method(request: Request, session: str) -> Response:
    """The router itself would name only the first of two routes with one path."""
    raise HTTPException(405, headers={"Allow": "DELETE, GET"})


@router.post("/sessions/{session}/switch", responses=answers(SwitchReply, "Prefetch is asked for.", 400, 404, 503))
async def switch_session(request: Request, session: Name, tenant: Tenant = "") -> Response:
    """This session is next: bring its chunks into DDR, and make room for them if there is a budget."""
    ledger = _ledger(request)
    found = await parts(request).facade.ask(lambda: ledger.switch(session, tenant=tenant))
    return _switched(found.found, found.chunks, [item.command_id for item in found.commands], f"session {session!r}")


@router.post("/intents/{intent}/switch", responses=answers(SwitchReply, "Prefetch is asked for.", 400, 404, 503))
async def switch_intent(request: Request, intent: Name, tenant: Tenant = "") -> Response:
    """This topic is next: the same for its newest sessions, at most 64."""
    ledger = _ledger(request)
    found = await parts(request).facade.ask(lambda: ledger.switch(intent=intent, tenant=tenant))
    return _switched(found.found, found.chunks, [item.command_id for item in found.commands], f"intent {intent!r}")


@router.delete("/sessions/{session}", responses=answers(CloseReply, "The session is over.", 400, 404, 503))
async def close(request: Request, session: Name, tenant: Tenant = "") -> Response:
    """End a session: chunks that nobody else holds are evicted from every tier."""
    ledger = _ledger(request)
    found = await parts(request).facade.ask(lambda: ledger.close(session, tenant=tenant))
    if not found.known:
        raise Refused(404, f"session {session!r} is not known")
    ids = tuple(item.command_id for item in found.commands)
    return reply(CloseReply(status="closed", session=session, num_chunks=found.chunks, command_ids=ids))


@router.post(
    "/requests", responses=answers(BeginReply, "The request is known.", 400, 404, 413, 503), openapi_extra=_BEGIN
)
async def begin(request: Request) -> Response:
    """Announce a request before it is sent: until its event comes, nothing that it or its session holds is evicted."""
    plain = parse_json_object(await read_body(request))
    request_id, session, intent, tenant = (_text(plain, name) for name in ("request_id", "session", "intent", "tenant"))
    hashes = plain.get("chunk_hashes") or []
    if not isinstance(hashes, list) or not all(isinstance(item, str) for item in hashes):
        raise InvalidMessage("chunk_hashes must be a list of texts")
    ledger = _ledger(request)
    begun = await parts(request).facade.ask(
        lambda: ledger.begin(request_id, session=session, intent=intent, tenant=tenant, chunk_hashes=hashes)
    )
    if begun is Begun.FOREIGN:
        raise Refused(404, f"session {session!r} is not one of tenant {tenant!r}")
    return reply(BeginReply(status="begun" if begun is Begun.BEGUN else "already", request_id=request_id))


def _ledger(request: Request) -> Ledger:
    state = request.app.state
    if getattr(state, "ledger", None) is None:
        facade = parts(request).facade
        state.ledger = Ledger(facade.client.bus, load_config(settings=facade.settings))
    ledger: Ledger = state.ledger
    if not ledger.config.kvcache_enabled:
        error = ConfigError("kvcache_enabled is false")
        raise Refused(503, error.message, code=error.code, hint="Set KVBUS_KVCACHE_ENABLED to use the ledger.")
    return ledger


def _switched(found: int, chunks: int, ids: list[str], who: str) -> Response:
    if not found:
        raise Refused(404, f"{who} is not known")
    return reply(SwitchReply(status="switched", num_sessions=found, num_chunks=chunks, command_ids=tuple(ids)))


def _text(plain: dict[str, Any], name: str) -> str:
    value = plain.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidMessage(f"{name} must be a text")
    return value


def _info(item: StoredSession, hashes: tuple[str, ...] = ()) -> SessionInfo:
    return SessionInfo(
        session=item.session,
        tenant=item.tenant,
        intent=item.intent,
        num_chunks=item.length,
        resident=item.resident,
        running=item.running,
        turns=item.turns,
        since_ms=item.since_ms,
        used_ms=item.used_ms,
        tags=item.tags,
        chunk_hashes=hashes,
    )
