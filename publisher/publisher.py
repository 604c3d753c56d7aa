"""The publisher's face: `publish` never waits and never raises; a thread of its own does the rest."""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from kvbus.errors import ConfigError, Stopped
from kvbus.metrics import Counters
from kvbus.settings import Settings, check_name
from publisher.buffer import Buffer
from publisher.bus import EventBus, StreamsBus
from publisher.drain import Drain
from publisher.finished import FinishedRequest

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,200}", re.ASCII)


class Publisher:
    """Publishes finished requests to the events stream, numbered without holes under (name, epoch).

    name: stable across restarts, one living process at a time. instance: the model server that it speaks for.
    A process that ends without `close` flushes all the same, as far as Python runs its exit handlers.
    bus: another way to the server, for tests. Use as a context manager, or call `start` and `close`.
    After a fork the child's copy refuses everything; a child that wants to publish makes a Publisher of its own.
    Raises ConfigError for a name that cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        name: str,
        instance: str,
        model: str = "",
        hash_fingerprint: str = "",
        bus: EventBus | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"publisher name {name!r:.220} is not a name", hint="Use letters, digits and '. _ - /'.")
        check_name("instance", instance)
        self.name = name
        self.settings = settings
        self._counters = Counters()
        self._buffer = Buffer(settings.buffer_events, settings.buffer_bytes)
        self._bus = bus if bus is not None else StreamsBus(settings, name, instance, model, hash_fingerprint)
        self._spool_path = (
            Path(settings.spool_dir) / quote(settings.namespace, safe="") / quote(name, safe="")
            if settings.spool_dir is not None
            else None
        )
        self._drain = Drain(
            settings, name, self._buffer, self._bus, self._counters, lambda: self.counters.snapshot(), self._spool_path
        )
        self._state_lock = threading.Lock()
        self._started = False
        self._closed: bool | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Start the thread. Does not wait for the server: events are buffered until it is there.

        Raises ConfigError if the spool's directory cannot be used, Stopped after `close`.
        """
        with self._state_lock:
            if self._closed is not None:
                raise Stopped(f"publisher {self.name} was closed")
            if self._started:
                return
            if self._spool_path is not None:
                try:
                    self._spool_path.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise ConfigError(f"spool_dir {self.settings.spool_dir!r}: {error}") from error
                if not os.access(self._spool_path, os.R_OK | os.W_OK | os.X_OK):
                    raise ConfigError(f"spool_dir {self.settings.spool_dir!r} cannot be written to")
            _watch(self)
            self._drain.start()
            self._started = True

    def publish(self, finished: FinishedRequest) -> bool:
        """Hand over one finished request. O(1): waits for nothing, checks nothing, raises nothing.

        False: dropped and counted, because the buffer is full (its number is used up, so readers see the hole) or
        because this publisher was closed.
        """
        return self._buffer.put(finished)

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop within timeout_s (settings.stop_ms when None). True if everything accepted was delivered.

        What could not be delivered in time stays in the spool for the next process of this name; without a spool it
        is dropped and counted as events_dropped_at_close. Calling it again returns the same answer.
        """
        with self._state_lock:
            if self._closed is None:
                self._buffer.close()
                timeout = self.settings.stop_ms / 1000 if timeout_s is None else timeout_s
                ended = self._drain.stop(timeout)
                if not ended:
                    _log.error("publisher %s: its thread did not end within %.1f s", self.name, timeout)
                _started.discard(self)
                self._closed = ended and self._drain.delivered_all
            return self._closed

    @property
    def counters(self) -> Counters:
        """What happened so far, brought up to date by this call.

        events_accepted = events_sent + events_dropped_invalid + events_dropped_at_close + what waits in the buffer or
        the spool. events_dropped: all that were refused or given up; events_dropped_* say why.
        """
        counters = self._counters
        buffer = self._buffer
        counters.set("events_accepted", buffer.accepted)
        counters.set("events_dropped_full", buffer.dropped_full)
        counters.set("events_dropped_closed", buffer.dropped_closed)
        counters.set("buffer_events", len(buffer))
        counters.set("buffer_bytes", buffer.nbytes)
        counters.set("next_seq", buffer.next_seq)
        counters.set("events_dropped", sum(counters.get(f"events_dropped_{why}") for why in DROP_REASONS))
        return counters

    def _forget_in_child(self) -> None:
        self._counters = Counters()
        self._state_lock = threading.Lock()
        self._closed = False
        self._buffer.forget_in_child()
        self._drain.forget_in_child()


DROP_REASONS = ("full", "closed", "invalid", "at_close")

_started: weakref.WeakSet[Publisher] = weakref.WeakSet()
_watching = False


def _watch(publisher: Publisher) -> None:
    global _watching
    if not _watching:
        os.register_at_fork(after_in_child=_after_fork_in_child)
        atexit.register(_close_all)
        _watching = True
    _started.add(publisher)


def _close_all() -> None:
    """At the end of the interpreter: what nobody closed is flushed, within its own bound."""
    for publisher in list(_started):
        publisher.close()


def _after_fork_in_child() -> None:
    for publisher in list(_started):
        publisher._forget_in_child()
    _started.clear()
