"""What went wrong, as HTTP: one place that knows which error has which status code."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvbus.errors import BusError, KVBusError, NoWorkers, ProtocolError, Stopped
from kvbus.facade.models import ErrorReply


class Refused(Exception):
    """A request that ends here. bare: the body is `error` alone, as clients of the older API know it."""

    def __init__(
        self, status: int, error: str, *, code: str | None = None, hint: str | None = None, bare: bool = False
    ) -> None:
        super().__init__(error)
        self.status = status
        self.reply = ErrorReply(error=error) if bare else ErrorReply(error=error, code=code or _code(status), hint=hint)


def reply(body: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def status_of(error: KVBusError) -> int:
    """400 for what the caller can mend in the request, 503 for what passes, 500 for the rest."""
    if isinstance(error, ProtocolError):
        return 400
    if isinstance(error, BusError | NoWorkers | Stopped):
        return 503
    return 500


async def on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return reply(error.reply, error.status)


async def on_kvbus_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KVBusError)
    status = status_of(error)
    headers = {"retry-after": "1"} if status == 503 else None
    command_id = getattr(request.state, "command_id", None)
    body = ErrorReply(error=error.message, code=error.code, hint=error.hint, command_id=command_id)
    return reply(body, status, headers)


def _code(status: int) -> str:
    return {400: "invalid", 401: "unauthorized", 403: "forbidden", 404: "not_found", 413: "over_limit"}.get(
        status, "http"
    )
