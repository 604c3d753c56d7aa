"""The HTTP server: uvicorn, with bounds on connections, headers and slow clients that it does not have itself."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvbus.errors import ConfigError
from kvbus.settings import Settings

MAX_CONNECTIONS = 1_024
MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 100
HEAD_S = 10.0
"""From the connection, or from a request's first byte, to the end of its headers."""
BODY_S = 30.0
"""From the end of the headers to the end of the body."""
WRITE_S = 30.0
"""How long a client may leave an answer unread once the buffers are full."""
KEEP_ALIVE_S = 75


class BoundedHttp(HttpToolsProtocol):
    """One connection. Every phase in which the client has to move has a time limit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        full = len(self.connections) >= MAX_CONNECTIONS
        super().connection_made(transport)
        # asyncio does this only for sockets whose protocol number is set, which ours is not: 40 ms a request.
        accepted: socket.socket = transport.get_extra_info("socket")
        if accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if full:
            self._turn_away("503 Service Unavailable", "too many connections")
        else:
            self._limit_reading(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit_reading(None)
        self._limit_writing(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._turn_away("431 Request Header Fields Too Large", f"headers exceed {MAX_HEADER_BYTES} bytes")
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._in_head and self._read_timer is None:
            # Blank lines between requests end the keep-alive timer and begin no request.
            self._limit_reading(HEAD_S)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._limit_reading(HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are of no use to us, and without end
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if len(self.headers) > MAX_HEADERS:
            self._turn_away("431 Request Header Fields Too Large", f"more than {MAX_HEADERS} headers")
            return
        self._limit_reading(BODY_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._limit_reading(None)
        # What follows is the head of the next request, of which nothing has been seen.
        self._in_head, self._head_bytes = True, 0
        if self.cycle is not None:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_writing(WRITE_S)

    def resume_writing(self) -> None:
        self._limit_writing(None)
        super().resume_writing()

    def _turn_away(self, status: str, error: str) -> None:
        body = b'{"error":"%s"}' % error.encode()
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status.encode(), len(body), body)
        )
        self.transport.close()

    def _limit_reading(self, seconds: float | None) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._read_timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _limit_writing(self, seconds: float | None) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class Server(uvicorn.Server):
    """Stops in order: waits end first, then connections, then the bus. A signal ends it with exit code 0."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.parts.facade.stopping.set()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    @property
    def app(self) -> FastAPI:
        app = self.config.app
        assert isinstance(app, FastAPI)
        return app


def make_server(app: FastAPI, settings: Settings) -> Server:
    """The server for an application; `.run(sockets=[listen(settings)])` serves until it is told to stop."""
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.stop_ms / 1000),
    )
    return Server(config)


def listen(settings: Settings) -> socket.socket:
    """The listening socket. Raises ConfigError, for an address that others can reach without a token, too."""
    host, port = settings.rest_host, settings.rest_port
    if not (is_loopback(host) or settings.rest_token or settings.rest_insecure):
        raise ConfigError(
            f"rest_host {host} can be reached from other machines, and there is no rest_token",
            hint="Set KVBUS_REST_TOKEN, or KVBUS_REST_INSECURE=1 where something else guards the port.",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="Is another facade, or LMCache's own API server, on that port? KVBUS_REST_PORT chooses another.",
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
