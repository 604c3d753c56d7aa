"""A TCP proxy that misbehaves on command, to stand between a client and a real server."""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from types import TracebackType
from typing import Self


class Mode(enum.Enum):
    PASS = "pass"
    CUT = "cut"
    BLACK_HOLE = "black_hole"
    DROP_REPLIES = "drop_replies"


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes everything to (host, port), until told otherwise.

    cut: connections end, new ones are closed at once. black_hole: connections stay open and nothing passes
    either way, what is sent is lost. drop_replies: requests pass, answers are lost. delay: each piece of an answer
    waits.
    A connection that has lost bytes is closed by `heal`: half an answer must never reach a client.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lock = threading.Lock()
        self._mode = Mode.PASS
        self._delay_s = 0.0
        self._closed = threading.Event()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._spoiled: set[tuple[socket.socket, socket.socket]] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.accepted = 0
        """Connections taken so far."""
        self.dropped_bytes = 0
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def point_at(self, host: str, port: int) -> None:
        """Where new connections go, as when a name changes its address. Open ones stay."""
        self._target = (host, port)

    def cut(self) -> None:
        """End all connections now, and every new one at once."""
        self._set(Mode.CUT)
        self._end_pairs()

    def cut_once(self) -> None:
        """End the connections there are; new ones pass."""
        self._end_pairs()

    def black_hole(self) -> None:
        self._set(Mode.BLACK_HOLE)

    def drop_replies(self) -> None:
        self._set(Mode.DROP_REPLIES)

    def delay(self, seconds: float) -> None:
        """Let every piece of every answer wait."""
        with self._lock:
            self._delay_s = seconds

    def heal(self) -> None:
        """Pass everything again. Connections that lost something are closed."""
        with self._lock:
            self._mode, self._delay_s = Mode.PASS, 0.0
            spoiled, self._spoiled = self._spoiled, set()
        for pair in spoiled:
            _end(*pair)

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_pairs()
        for thread in list(self._threads):
            thread.join(10)

    def _set(self, mode: Mode) -> None:
        with self._lock:
            self._mode = mode

    def _end_pairs(self) -> None:
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            _end(*pair)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.accepted += 1
                mode = self._mode
            if mode is Mode.CUT:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = (near, far)
            with self._lock:
                self._pairs.add(pair)
            remaining = [2]
            self._start(self._pump, pair, near, far, False, remaining)
            self._start(self._pump, pair, far, near, True, remaining)
            if self._closed.is_set():
                _end(*pair)

    def _pump(
        self,
        pair: tuple[socket.socket, socket.socket],
        source: socket.socket,
        sink: socket.socket,
        replies: bool,
        remaining: list[int],
    ) -> None:
        try:
            while data := source.recv(65_536):
                if replies and self._delay_s:
                    self._closed.wait(self._delay_s)
                with self._lock:
                    mode = self._mode
                    lost = mode is Mode.BLACK_HOLE or (replies and mode is Mode.DROP_REPLIES)
                    # Once a piece of an answer is lost, what follows on that connection is lost as well.
                    if lost or pair in self._spoiled:
                        self._spoiled.add(pair)
                        self.dropped_bytes += len(data)
                        if lost or replies:
                            continue
                sink.sendall(data)
        except OSError:
            pass  # one end is gone: so is the other
        finally:
            _end(*pair)
            with self._lock:
                remaining[0] -= 1
                if remaining[0] == 0:
                    self._pairs.discard(pair)
                    self._spoiled.discard(pair)
                    for end in pair:
                        end.close()


def _end(*ends: socket.socket) -> None:
    # shutdown, not close: it wakes the thread that waits in recv, and the number cannot be taken by another socket.
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
