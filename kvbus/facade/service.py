"""The facade's one way to the bus: sends commands, and waits for their answers without a thread or a call each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from kvbus.aio import AsyncHandle, AsyncKVBus, settled
from kvbus.answers import CommandState
from kvbus.client import KVBus
from kvbus.errors import BusError, BusUnavailable, NoWorkers, Stopped
from kvbus.facade import replies
from kvbus.metrics import Counters
from kvbus.protocol.commands import Command
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.registry import Member

_log = logging.getLogger(__name__)

T = TypeVar("T")
AWAY_AFTER_S = 1.8
"""A command that the bus has not taken by then is refused with 503."""
SEND_S = 0.8
CONNECT_MS = 800
REPLY_MS = 1_000
ROLL_EVERY_S = 1.0
THREADS = 16


class Facade:
    """Stateless but for its caches: kill it, start two of it, nothing is lost. Belongs to one event loop."""

    def __init__(self, settings: Settings, bus: Bus | None = None) -> None:
        self.settings = settings
        self.client = KVBus(settings, issuer="facade", bus=bus or Bus(_impatient(settings), client_name="kvbus-facade"))
        self._owns_bus = bus is None
        self.bus = AsyncKVBus(client=self.client, threads=THREADS)
        self.counters = Counters()
        self.members: tuple[Member, ...] = ()
        """Who was registered when the roll was last called."""
        self.bus_error: BusError | None = None
        """Why the last roll could not be called."""
        self.stopping = asyncio.Event()
        self._roll: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to follow the bus; it need not be there yet."""
        self._roll = asyncio.create_task(self._call_the_roll(), name="kvbus-roll")

    async def stop(self) -> None:
        """End every wait, then the threads and the connections."""
        self.stopping.set()
        if self._roll is not None:
            self._roll.cancel()
            with suppress(asyncio.CancelledError):
                await self._roll
        await asyncio.get_running_loop().run_in_executor(None, self.client.close)
        if self._owns_bus:
            self.client.bus.close()
        await self.bus.close()

    async def send(self, command: Command) -> AsyncHandle:
        """Put the command on the stream. Raises NoWorkers, with nothing written, BusError, ProtocolError.

        After an outage of the bus every heartbeat has lapsed: nobody is called dead in the first two seconds.
        """
        while True:
            try:
                async with asyncio.timeout(AWAY_AFTER_S):
                    return await self.bus.send(command, timeout_s=SEND_S, need_workers=True)
            except TimeoutError:
                raise BusUnavailable(f"the bus did not take the {command.TYPE} within {AWAY_AFTER_S:g} s") from None
            except NoWorkers:
                if not self.client.answers.may_return(await self.roll_call()):
                    raise
            await asyncio.sleep(0.1)

    async def wait(self, handle: AsyncHandle, seconds: float, *, final: bool = False) -> CommandState:
        """Until every live worker has answered (final: for good), or the time is over. Raises Stopped."""
        until = settled if final else replies.answered
        waiting = asyncio.ensure_future(handle.wait(seconds, until=until))
        stopping = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Stopped("the facade is stopping; the command is on the bus, ask for it by its command_id")
            return waiting.result()
        finally:
            stopping.cancel()
            waiting.cancel()

    async def roll_call(self) -> tuple[Member, ...]:
        """Who is registered, and who of them is alive. Raises BusError."""
        return await self.ask(self.client.workers)

    async def ask(self, function: Callable[[], T]) -> T:
        """Run a short blocking call to the bus in a thread. Raises BusError, in bounded time."""
        try:
            async with asyncio.timeout(AWAY_AFTER_S):
                return await self.bus.call(function)
        except TimeoutError:
            raise BusUnavailable(f"the bus did not answer within {AWAY_AFTER_S:g} s") from None

    async def _call_the_roll(self) -> None:
        """Know who is alive, and since when the others are silent, before a command asks."""
        while True:
            try:
                self.members = await self.ask(self._look)
                if self.bus_error is not None:
                    _log.warning("the bus is back")
                self.bus_error = None
            except BusError as error:
                if self.bus_error is None:
                    _log.warning("the bus is away: %s", error)
                self.bus_error = error
                self.counters.add("bus_errors")
            await asyncio.sleep(ROLL_EVERY_S)

    def _look(self) -> tuple[Member, ...]:
        members = self.client.workers()
        self.client.answers.start()
        return members


def _impatient(settings: Settings) -> Settings:
    """A client over HTTP is told within two seconds that the bus is away."""
    return msgspec.structs.replace(
        settings,
        connect_timeout_ms=min(settings.connect_timeout_ms, CONNECT_MS),
        reply_timeout_ms=min(settings.reply_timeout_ms, REPLY_MS),
    )
