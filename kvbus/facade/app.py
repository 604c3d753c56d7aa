"""The facade as an ASGI application, and as a process."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import disable_created_metrics
from starlette.exceptions import HTTPException
from starlette.responses import Response

import kvbus
from kvbus.errors import KVBusError
from kvbus.facade import commands, memory_routes, queries
from kvbus.facade.documents import document
from kvbus.facade.errors import Refused, on_kvbus_error, on_refused, reply
from kvbus.facade.guard import Guard
from kvbus.facade.logs import json_logs
from kvbus.facade.metrics import Metrics
from kvbus.facade.models import ErrorReply
from kvbus.facade.parts import Parts
from kvbus.facade.server import listen, make_server
from kvbus.settings import Settings, load_settings
from kvbus.streams.connection import Bus


def create_app(settings: Settings | None = None, bus: Bus | None = None) -> FastAPI:
    """The application. settings: None reads KVBUS_* from the environment. bus: one that exists already, not closed."""
    chosen = settings or load_settings()
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        made = app.state.parts = Parts(chosen, bus, metrics)
        await made.facade.start()
        try:
            yield
        finally:
            await made.facade.stop()

    app = FastAPI(
        title="kvbus",
        description="Prefetch and evict KV chunks on every LMCache worker, over a Redis stream.",
        version=kvbus.__version__,
        lifespan=lifespan,
        redoc_url=None,
    )
    app.include_router(commands.router)
    app.include_router(queries.router)
    app.include_router(memory_routes.router)
    app.add_exception_handler(Refused, on_refused)
    app.add_exception_handler(KVBusError, on_kvbus_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(Guard, token=chosen.rest_token or None, root_path=chosen.rest_root_path, metrics=metrics)
    app.openapi = _document_once(app, secured=bool(chosen.rest_token))  # type: ignore[method-assign]
    return app


def run(settings: Settings | None = None) -> None:
    """Serve until SIGINT or SIGTERM, with JSON log lines on stderr. Raises ConfigError when it cannot listen."""
    chosen = settings or load_settings()
    server = make_server(create_app(chosen), chosen)
    # A signal counts from here on, and never breaks off the loop's own beginning.
    with listen(chosen) as listening, json_logs(), server.capture_signals():
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        told = f"kvbus facade on http://{shown}:{port}{chosen.rest_root_path} (docs under /docs)"
        print(told, file=sys.stderr, flush=True)
        # A second line for every counter, of no use in the text format.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        server.run(sockets=[listening])


def _document_once(app: FastAPI, *, secured: bool) -> Any:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app, secured=secured)
        return app.openapi_schema

    return openapi


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    where = ".".join(str(part) for part in found["loc"])
    return reply(ErrorReply(error=f"{where}: {found['msg']}, not {found.get('input')!r:.80}", code="invalid"), 400)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return reply(ErrorReply(error=str(error.detail), code="http"), error.status_code, headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The trace goes to the log, the client learns that it is our fault."""
    return reply(ErrorReply(error="an error in the facade itself; its log has the trace", code="internal"), 500)
