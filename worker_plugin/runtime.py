"""One worker: its threads, its heartbeat, its loop. A guest: it never raises into its host, and stops within a bound.

kvbus-reader     takes commands, carries out the short ones, commits; reconnects and reopens
kvbus-prefetch   carries out prefetches (prefetches.py), with up to two kvbus-read for files (engine_files.py)
kvbus-keeper     heartbeat, counters, commits of the long lane, watchdog
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any

import msgspec

import kvbus
from kvbus.errors import BusError, Fenced, HistoryLost
from kvbus.metrics import Counters, RateLimitedLog
from kvbus.settings import Settings, default_instance, load_settings
from kvbus.streams.connection import Bus
from kvbus.streams.keys import worker_name
from kvbus.streams.registry import Registration, update_registration, write_stats
from kvbus.streams.worker_log import WorkerLog
from worker_plugin.engine_types import Engine
from worker_plugin.executor import Executor

_log = logging.getLogger(__name__)

ANSWER_EVERY_S = 0.05
"""Of a batch whose commands take longer, the first are answered before the last are carried out."""


class WorkerState(StrEnum):
    STARTING = "starting"
    """Not registered yet: the bus is away, or an earlier process of this name has not lapsed."""
    RUNNING = "running"
    STOPPED = "stopped"
    FENCED = "fenced"
    """Another process has taken over the name; this worker does nothing any more."""


class Worker:
    """Carries out the commands of one namespace on one engine.

    engine: the verbs. instance, rank: the worker's name is `<instance>/<rank>`. Starts with `start`, ends with `stop`,
    or use it as a context manager. on_fenced: told, from a thread of the worker, when another process has taken over.
    bus: None makes one from the settings.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        settings: Settings,
        instance: str,
        rank: int,
        vllm_version: str = "",
        on_fenced: Callable[[], None] | None = None,
        bus: Bus | None = None,
    ) -> None:
        self.settings = settings
        self.name = worker_name(instance, rank)
        self.counters = Counters()
        self.state = WorkerState.STARTING
        info = engine.info
        registration = Registration(
            instance=instance,
            rank=rank,
            world_size=info.world_size,
            model=info.model,
            chunk_size=info.chunk_size,
            hash_fingerprint=info.hash_fingerprint,
            tiers=info.tiers,
            stores=info.stores,
            kvbus=kvbus.__version__,
            lmcache=info.lmcache_version,
            vllm=vllm_version,
            host=default_instance(),
            pid=os.getpid(),
        )
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._bus = bus or Bus(settings, client_name=f"kvbus-worker-{self.name}")
        self._owns_bus = bus is None
        self._worker_log = WorkerLog(self._bus, self.name, registration)
        self._executor = Executor(
            self._worker_log,
            engine,
            retry_ms=settings.deferred_retry_ms,
            counters=self.counters,
            long_done=self._wake.set,
        )
        self.engine = engine
        self._on_fenced = on_fenced
        self._opened = threading.Event()
        self._fence_lock = threading.Lock()
        self._history_lost = False
        self._stuck = False
        self._limited = RateLimitedLog(_log)
        self._reader = threading.Thread(target=self._run, args=(self._read_loop,), name="kvbus-reader", daemon=True)
        self._keeper = threading.Thread(target=self._run, args=(self._keep_loop,), name="kvbus-keeper", daemon=True)

    def start(self) -> None:
        """Begin. Returns at once; the bus may be away."""
        self._executor.start()
        self._reader.start()
        self._keeper.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Until the worker is registered and takes commands."""
        return self._opened.wait(timeout_s)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Finish or leave what is in hand, commit, give the name back. True when every thread has ended in time."""
        bound = self.settings.stop_ms / 1000 if timeout_s is None else timeout_s
        deadline = time.monotonic() + bound
        self._stop.set()
        self._wake.set()
        lanes = self._executor.stop(bound * 0.6)
        # Who is told of a take-over may stop the worker from one of its own threads, which ends right afterwards.
        others = {self._reader, self._keeper} - {threading.current_thread()}
        while self._reader in others and self._reader.is_alive() and time.monotonic() < deadline:
            # Again and again: it may have been about to wait when it was interrupted.
            self._worker_log.interrupt()
            self._reader.join(0.05)
        if self._keeper in others and self._keeper.is_alive():
            self._keeper.join(max(0.1, deadline - time.monotonic()))
        if self.state is WorkerState.RUNNING and not self._reader.is_alive():
            try:
                self._worker_log.close()
            except (BusError, HistoryLost) as error:
                # What is in hand stays on the stream: the next life takes it up.
                _log.warning("worker %s could not sign off: %s", self.name, error)
        ended = lanes and not any(thread.is_alive() for thread in others)
        if not ended:
            _log.error("worker %s: a thread is still inside the engine after %.1f s", self.name, bound)
        if self.state is not WorkerState.FENCED:
            self.state = WorkerState.STOPPED
        if self._owns_bus:
            self._bus.close()
        return ended

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        finally:
            if self.state is WorkerState.FENCED:
                # This thread may have connected anew after the other one found out.
                if threading.current_thread() is self._reader:
                    self._worker_log.disconnect()
                if self._owns_bus:
                    self._bus.close()

    # -- the reading thread ------------------------------------------------------------------------------------

    def _read_loop(self) -> None:
        backoff = 0.05
        while not self._stop.is_set():
            try:
                if not self._opened.is_set():
                    if not self._open():
                        continue
                elif self._history_lost:
                    self._worker_log.reopen()
                    self._history_lost = False
                self._round()
                backoff = 0.05
            except Fenced as error:
                self._fence(error)
                return
            except BusError as error:
                if isinstance(error, HistoryLost):
                    self._history_lost = True
                    self.counters.add("history_lost")
                if self._stop.is_set():
                    return
                self.counters.add("bus_errors")
                self._limited.warning("bus", "worker %s: %s; trying again", self.name, error)
                self._stop.wait(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, 1.0)
            except Exception:  # noqa: BLE001 - a guest's fault must not end in silence: it is counted, told, and retried
                self.counters.add("internal_errors")
                _log.exception("worker %s: unexpected error; going on", self.name)
                self._stop.wait(backoff)
                backoff = min(backoff * 2, 5.0)

    def _open(self) -> bool:
        taken = self._worker_log.open()
        if taken is None:
            self._worker_log.flush()
            self.state = WorkerState.RUNNING
            self._opened.set()
            policy = self._bus.risky_eviction()
            if policy is not None:
                _log.warning("the server's maxmemory-policy %s may remove whole streams: set it to noeviction", policy)
            _log.info("worker %s takes commands of namespace %s", self.name, self.settings.namespace)
            return True
        self._limited.warning(
            "taken",
            "worker %s: the name belongs to a process whose heartbeat lapses in %d ms; waiting",
            self.name,
            taken.lapses_in_ms,
        )
        self._stop.wait(min(max(taken.lapses_in_ms, 50), 1000) / 1000)
        return False

    def _round(self) -> None:
        careful = self._worker_log.careful
        tasks = self._worker_log.read(block_ms=self._executor.wait_ms(self.settings.block_ms))
        answer_at = time.monotonic() + ANSWER_EVERY_S
        for task in tasks:
            if self._stop.is_set():
                return  # the rest stays in hand
            self._executor.run(task)
            if careful:
                self._executor.settle()
            if time.monotonic() > answer_at and task is not tasks[-1]:
                self._wake.set()  # the keeper commits what is done, while this thread goes on
                answer_at = time.monotonic() + ANSWER_EVERY_S
        self._executor.retry()

    def _fence(self, error: Fenced) -> None:
        with self._fence_lock:
            if self.state is WorkerState.FENCED:
                return  # the other thread has found it out, too
            self.state = WorkerState.FENCED
        self._stop.set()
        self._wake.set()
        self.counters.add("fenced")
        _log.error("worker %s stops: %s. %s", self.name, error, error.hint)
        self._executor.stop(0)
        if self._owns_bus:
            self._bus.close()
        if self._on_fenced is not None:
            self._on_fenced()

    # -- the keeper's thread -----------------------------------------------------------------------------------

    def _keep_loop(self) -> None:
        beat_s = self.settings.heartbeat_ms / 1000
        beat_at = stats_at = 0.0
        while not self._stop.is_set():
            # Woken by the long lane's results and by the stop, else for the next heartbeat.
            self._wake.wait(max(0.0, beat_at + beat_s - time.monotonic()) if self._opened.is_set() else 0.1)
            self._wake.clear()
            if self._stop.is_set():
                return
            if not self._opened.is_set():
                continue
            try:
                if self._worker_log.dirty:
                    # No answer waits for the command behind it, which may be long, or for a read that blocks.
                    self._worker_log.flush()
                now = time.monotonic()
                if now - beat_at >= beat_s:
                    beat_at = now
                    self._worker_log.renew()
                    self._watch_engine()
                if now - stats_at >= self.settings.stats_ms / 1000:
                    stats_at = now
                    write_stats(self._bus, self.name, self.stats())
            except Fenced as error:
                self._fence(error)
                self._worker_log.interrupt()
                return
            except BusError as error:
                self.counters.add("bus_errors")
                if isinstance(error, HistoryLost) and not self._history_lost:
                    self._history_lost = True
                    self._worker_log.interrupt()
                self._limited.warning("keeper", "worker %s: %s", self.name, error)
            except Exception:  # noqa: BLE001 - see _read_loop
                self.counters.add("internal_errors")
                _log.exception("worker %s: unexpected error in the keeper; going on", self.name)
                self._stop.wait(1.0)

    def _watch_engine(self) -> None:
        """An engine call that does not return is told to everyone, so that nobody waits for this rank."""
        stuck = self._executor.busy_s * 1000 > self.settings.stuck_ms
        if stuck != self._stuck:
            log = self._worker_log
            # Kept there as well: whoever registers anew, after the server forgot it, still is what it was.
            log.registration = msgspec.structs.replace(log.registration, stuck=stuck)
            update_registration(
                self._bus, self.name, log.owner, msgspec.structs.replace(log.registration, epoch=log.epoch)
            )
            self._stuck = stuck
            if stuck:
                self.counters.add("stuck")
                _log.error("worker %s: an engine call has not returned for %.0f s", self.name, self._executor.busy_s)
            else:
                _log.warning("worker %s: the engine call has returned", self.name)

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges, as they are written to the `stats` key."""
        log = self._worker_log
        values = dict(self.counters.snapshot())
        values |= {
            "epoch": log.epoch,
            "pending": log.in_hand,
            "prefetches_waiting": self._executor.queued,
            "evicts_deferred": self._executor.deferred,
            "entries_read": log.position.entries,
            "duplicates": log.duplicates,
            "gaps": log.gaps,
            "dead_letters": log.dead_letters,
            "unwritten": log.unwritten,
            "engine_stuck": int(self._stuck),
            "engine_busy_s": round(self._executor.busy_s, 3),
        }
        return values


def attach(
    lmcache_engine: Any,
    *,
    settings: Settings | None = None,
    instance: str | None = None,
    rank: int | None = None,
    vllm_version: str = "",
    on_fenced: Callable[[], None] | None = None,
) -> Worker:
    """Start a worker on any living LMCacheEngine, after its post_init(). The caller stops it before the engine.

    settings: None reads KVBUS_* from the environment. instance: None takes the setting, else the host's name.
    rank: None takes the engine's own. Raises EngineIncompatible, ConfigError.
    """
    from worker_plugin.engine import LMCacheEngineAdapter

    chosen = settings or load_settings()
    engine = LMCacheEngineAdapter(lmcache_engine, max_share=chosen.prefetch_max_share)
    worker = Worker(
        engine,
        settings=chosen,
        instance=instance or chosen.instance or default_instance(),
        rank=engine.info.rank if rank is None else rank,
        vllm_version=vllm_version,
        on_fenced=on_fenced,
    )
    worker.start()
    return worker
