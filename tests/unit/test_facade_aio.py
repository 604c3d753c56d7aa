"""The asyncio face of the client: the same commands, awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvbus.aio import AsyncKVBus
from kvbus.answers import CommandState
from kvbus.errors import InvalidMessage, NotAnswered, NoWorkers
from kvbus.protocol.commands import Evict
from kvbus.protocol.results import Status
from kvbus.streams.registry import load_reader
from tests.facade_kit import QUICK, Scene, result, say_nothing, scene
from tests.servers import Server
from tests.unit.test_facade_events import publish


@pytest.fixture
def here(server: Server, namespace: str) -> Iterator[Scene]:
    with scene(server.settings(namespace, **QUICK)) as made:
        yield made


def test_commands_are_sent_and_answered(here: Scene) -> None:
    here.worker("a/0")
    here.worker("a/1")

    async def main() -> None:
        async with AsyncKVBus(here.settings, issuer="test") as bus:
            for handle in (
                await bus.evict(["1", "2"]),
                await bus.prefetch([1], lookup_id="x"),
                await bus.lookup([1]),
                await bus.ping(),
            ):
                assert {member.name for member in handle.members} == {"a/0", "a/1"}
                results = await handle.results(20)
                assert {answer.result.type for answer in results.values()} == {handle.command.TYPE}
            assert [member.alive for member in await bus.workers()] == [True, True]

    asyncio.run(main())


def test_many_wait_without_a_thread_each(here: Scene) -> None:
    here.worker("a/0")

    async def main() -> int:
        async with AsyncKVBus(here.settings) as bus:
            handles = await asyncio.gather(*(bus.evict([number]) for number in range(200)))
            states = await asyncio.gather(*(handle.wait(30) for handle in handles))
            assert all(state.complete for state in states)
            assert len({state.command_id for state in states}) == 200
            return threading.active_count()

    before = threading.active_count()
    assert asyncio.run(main()) < before + 60


def test_a_wait_ends_where_it_is_told_to(here: Scene) -> None:
    here.worker("a/0", lambda task: [result(task, Status.DEFERRED, in_use=1)])

    async def main() -> None:
        async with AsyncKVBus(here.settings) as bus:
            handle = await bus.evict([1])
            state: CommandState = await handle.wait(30, until=lambda now: bool(now.answers))
            assert state.answers["a/0"].result.status is Status.DEFERRED
            assert state.waiting == ("a/0",)
            state = await handle.wait(0.05)
            assert not state.settled

    asyncio.run(main())


def test_a_stuck_rank_is_named_where_results_are_asked_for(here: Scene) -> None:
    here.worker("a/0", say_nothing, stuck=True)

    async def main() -> None:
        async with AsyncKVBus(here.settings) as bus:
            handle = await bus.evict([1])
            with pytest.raises(NotAnswered, match=r"from a/0 \(stuck\)"):
                await handle.results(5)

    asyncio.run(main())


def test_silence_is_an_error_only_where_results_are_asked_for(here: Scene) -> None:
    here.worker("a/0", say_nothing)

    async def main() -> None:
        async with AsyncKVBus(here.settings) as bus:
            handle = await bus.evict([1])
            with pytest.raises(NotAnswered, match="a/0"):
                await handle.results(0.05)
            with pytest.raises(InvalidMessage):
                await bus.evict(["nope"])

    asyncio.run(main())


def test_nothing_is_written_for_nobody(here: Scene) -> None:
    async def main() -> None:
        async with AsyncKVBus(here.settings) as bus:
            with pytest.raises(NoWorkers):
                await bus.send(Evict(chunk_hashes=(1,)), need_workers=True)

    asyncio.run(main())
    assert here.commands() == 0


def test_events_resume_under_a_readers_name(here: Scene) -> None:
    """The place is saved when all that one read brought has been taken: what comes after a break comes again."""

    async def read(last: int) -> list[int]:
        found: list[int] = []
        async with AsyncKVBus(here.settings) as bus:
            async for delivery in bus.events(reader="memory", start="start"):
                seq: int = delivery.event.seq  # type: ignore[union-attr]
                found.append(seq)
                if seq == last:
                    break
        return found

    for seq in (0, 1):
        publish(here.bus(), seq)
    assert asyncio.run(read(1)) == [0, 1]
    publish(here.bus(), 2)
    assert asyncio.run(read(2)) == [0, 1, 2]


def test_a_batch_that_was_taken_does_not_come_again(here: Scene) -> None:
    async def read(stop: asyncio.Event, found: list[int], bus: AsyncKVBus) -> None:
        async for delivery in bus.events(reader="memory", start="start"):
            found.append(delivery.event.seq)  # type: ignore[union-attr]
            stop.set()

    async def main(found: list[int]) -> None:
        async with AsyncKVBus(here.settings) as bus:
            taken = asyncio.Event()
            reading = asyncio.create_task(read(taken, found, bus))
            await taken.wait()
            while load_reader(here.bus(), "memory") is None or len(found) < 1:
                await asyncio.sleep(0.01)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    seen: list[int] = []
    publish(here.bus(), 0)
    asyncio.run(main(seen))
    publish(here.bus(), 1)
    again: list[int] = []
    asyncio.run(main(again))
    assert (seen, again) == ([0], [1])


def test_leaving_an_event_loop_leaves_no_thread(here: Scene) -> None:
    async def main() -> None:
        async with AsyncKVBus(here.settings) as bus:
            reader = asyncio.create_task(_first(bus))
            await asyncio.sleep(0.2)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    before = set(threading.enumerate())
    asyncio.run(main())
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread


async def _first(bus: AsyncKVBus) -> None:
    async for _ in bus.events():
        return
