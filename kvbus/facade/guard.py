"""Around every request: who may ask, what is counted, and one line in the log."""

from __future__ import annotations

import hmac
import logging
import random
import re
import time

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvbus.facade.errors import reply
from kvbus.facade.metrics import Metrics
from kvbus.facade.models import ErrorReply

access_log = logging.getLogger("kvbus.facade.access")
OPEN_PATHS = frozenset(("/healthz", "/readyz", "/docs", "/docs/oauth2-redirect", "/openapi.json"))
"""Without a token: what probes ask, and what the documentation holds anyway."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class AccessLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. Never a token, a password, a query or a body."""

    at: float
    id: str
    method: str
    path: str
    status: int
    ms: float
    client: str
    command_id: str | None = None
    counts: dict[str, int] | None = None
    error: str | None = None


class Guard:
    """ASGI middleware. token: None lets everyone in. root_path: where a proxy has put us, "" for nowhere."""

    def __init__(self, app: ASGIApp, *, token: str | None, root_path: str, metrics: Metrics) -> None:
        self._app = app
        self._root = f"/{root_path.strip('/')}" if root_path.strip("/") else ""
        self._expected = f"Bearer {token}".encode() if token is not None else None
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(64):016x}"
        state = scope.setdefault("state", {})
        if self._root:
            # Proxies may or may not strip the prefix; ASGI wants it in both.
            whole = scope["path"] == self._root or scope["path"].startswith(f"{self._root}/")
            scope["path"] = scope["path"] if whole else self._root + scope["path"]
            scope["root_path"] = self._root

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(b"x-request-id", request_id.encode())]
                if state.get("command_id"):
                    extra.append((b"x-kvbus-command-id", state["command_id"].encode()))
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        self._metrics.in_flight.inc()
        error = None
        try:
            refusal = self._refusal(scope, headers)
            if refusal is None:
                await self._app(scope, receive, note)
            else:
                await refusal(scope, receive, note)
        except BaseException as caught:
            error = type(caught).__name__
            raise
        finally:
            self._metrics.in_flight.dec()
            seconds = time.perf_counter() - began
            self._metrics.observe(scope["method"], _route(scope), status, seconds)
            if access_log.isEnabledFor(logging.INFO):
                line = AccessLine(
                    at=round(time.time(), 3),
                    id=request_id,
                    method=scope["method"][:16],
                    path=scope["path"][:200],
                    status=status,
                    ms=round(seconds * 1000, 2),
                    client=(scope.get("client") or ("",))[0],
                    command_id=state.get("command_id"),
                    counts=state.get("counts"),
                    error=error,
                )
                access_log.info("%s", msgspec.json.encode(line).decode())

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ASGIApp | None:
        if headers.get(b"sec-fetch-site") == b"cross-site":
            # A page of a stranger, open in a browser that can reach us, could otherwise post commands.
            error = ErrorReply(error="requests from other sites' pages are refused", code="forbidden")
            return reply(error, 403)
        if self._expected is None or scope["path"].removeprefix(self._root) in OPEN_PATHS:
            return None
        if hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return None
        error = ErrorReply(
            error="a bearer token is required",
            code="unauthorized",
            hint="Send the header `Authorization: Bearer <token>` with the token of KVBUS_REST_TOKEN.",
        )
        return reply(error, 401, {"www-authenticate": "Bearer"})


def _route(scope: Scope) -> str:
    """The route's pattern: a label must not grow with what clients ask for."""
    return getattr(scope.get("route"), "path", None) or "other"
