"""However a worker ends and whatever the network does: each command gets exactly one final result from it."""

from __future__ import annotations

import os

import pytest

from kvbus.protocol.results import Status
from kvbus.streams.connection import Client
from tests.contract.line import FAULTS, Clock
from tests.contract.simulator import Kind, World, prime
from tests.servers import Server

HISTORIES = int(os.environ.get("KVBUS_TEST_HISTORIES", "1"))
"""Multiplies the number of random histories, for a long run by hand."""
SHARE = 40
WEATHER = ((0.0, 0.0), (0.05, 0.0), (0.2, 0.0), (0.0, 0.02), (0.05, 0.02), (0.2, 0.05))
"""Rates of faults and of sudden deaths, per call."""


@pytest.fixture
def client(server: Server) -> Client:
    client = server.client()
    prime(client)
    return client


def run_histories(client: Client, namespace: str, clock: Clock, seeds: range) -> None:
    for seed in seeds:
        world = World(client, f"{namespace}-{seed}", seed, workers=1 + seed % 2, clock=clock)
        fault_rate, kill_rate = WEATHER[seed % len(WEATHER)]
        try:
            world.run(40, fault_rate=fault_rate, kill_rate=kill_rate)
            world.judge()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            world.clear()


@pytest.mark.parametrize("part", range(10 * HISTORIES))
def test_random_histories_on_valkey(valkey: Server, namespace: str, clock: Clock, part: int) -> None:
    client = valkey.client()
    prime(client)
    run_histories(client, namespace, clock, range(part * SHARE, (part + 1) * SHARE))


@pytest.mark.parametrize("part", range(HISTORIES))
def test_random_histories(client: Client, namespace: str, clock: Clock, part: int) -> None:
    start = 1_000_000 + part * SHARE
    run_histories(client, namespace, clock, range(start, start + SHARE))


def one_of_each(world: World, number: int = 0, fault: str = "") -> int:
    """A fixed history: every kind of command, a duplicate, and processes that go on where another has ended.

    One call, counted from 1, suffers the fault. Returns how many there were.
    """
    world.begin()
    before = world.calls
    world.strike = (before + number, fault)
    for number, kind in enumerate((Kind.SHORT, Kind.LONG, Kind.BAD, Kind.DEFERRED)):
        world.add(f"c{number}", kind)
    for _ in range(3):
        world.guarded(world.alive["sim/0"], world.alive["sim/0"].turn)
    world.client.xadd(world.keys.commands, world.fields["c1"])
    world.add("c4", Kind.SHORT)
    for _ in range(3):
        world.guarded(world.alive["sim/0"], world.alive["sim/0"].turn)
    world.bury(world.alive["sim/0"])
    for _ in range(6):
        world.guarded(world.alive["sim/0"], world.alive["sim/0"].turn)
    life = world.alive["sim/0"]
    if life.opened:
        world.guarded(life, lambda: world.stop(life))
    world.add("c5", Kind.LONG)
    world.guarded(world.alive["sim/0"], world.alive["sim/0"].turn)
    calls = world.calls - before
    world.settle()
    return calls


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_every_single_call(valkey: Server, namespace: str, clock: Clock, fault: str) -> None:
    client = valkey.client()
    prime(client)
    calls = number = 1
    while number <= calls:
        world = World(client, f"{namespace}-{number}", seed=7, workers=1, clock=clock)
        try:
            calls = one_of_each(world, number, fault)
            world.judge()
        except Exception as error:
            error.add_note(f"{fault} at call {number}")
            raise
        finally:
            world.clear()
        number += 1
    assert calls > 30


@pytest.mark.parametrize("committed", [True, False], ids=["taken on record", "taken and not on record"])
def test_third_crash_sets_the_entry_aside_and_the_others_run_once(
    client: Client, namespace: str, clock: Clock, committed: bool
) -> None:
    world = World(client, namespace, seed=1, workers=1, clock=clock)
    world.begin()
    world.add("before", Kind.SHORT)
    if committed:  # others are in hand already, and the checkpoint says so
        world.add("long", Kind.LONG)
        world.guarded(world.alive["sim/0"], world.alive["sim/0"].turn)
    world.add("killer", Kind.KILLER)
    world.add("after", Kind.SHORT)
    world.add("deferred", Kind.DEFERRED)
    world.settle()
    world.judge()
    assert world.begun["sim/0", "killer"] == 3
    found = world.verdict()
    assert found.dead == {"killer": 1}
    assert found.finals["sim/0", "killer"][0].attempt == 3
    for own_id in set(world.kinds) - {"killer"}:
        assert found.finals["sim/0", own_id][0].status is Status.DONE
    assert len(world.ended) == 3


def test_clean_stop_does_not_wash_an_entry_clean(client: Client, namespace: str, clock: Clock) -> None:
    world = World(client, namespace, seed=1, workers=1, clock=clock)
    world.begin()
    world.add("killer", Kind.KILLER)
    for _ in range(3):  # killed on it, opened and stopped in good order before it is tried again
        life = world.alive["sim/0"]
        while life is world.alive["sim/0"]:
            world.guarded(life, life.turn)
        successor = world.alive["sim/0"]
        assert successor.log.open() is None
        successor.opened = True
        world.stop(successor)
    world.settle()
    world.judge()
    assert world.begun["sim/0", "killer"] == 3


def test_innocent_long_command_outlives_crashes_of_others(client: Client, namespace: str, clock: Clock) -> None:
    world = World(client, namespace, seed=3, workers=1, clock=clock)
    world.begin()
    for number in range(4):
        world.add(f"long{number}", Kind.LONG)
        world.add(f"killer{number}", Kind.KILLER)
    world.settle()
    world.judge()
    found = world.verdict()
    for number in range(4):
        assert found.finals["sim/0", f"long{number}"][0].status is Status.DONE
        # Behind the first one nobody knows how far the batch had been begun: it is taken to have been.
        assert world.begun["sim/0", f"killer{number}"] == (2 if number else 3)


def test_bad_entries_become_one_dead_letter_among_many_workers(client: Client, namespace: str, clock: Clock) -> None:
    world = World(client, namespace, seed=5, workers=64, clock=clock)
    world.begin()
    world.add("good", Kind.SHORT)
    world.add("bad", Kind.BAD)
    world.add("also good", Kind.SHORT)
    world.settle()
    world.judge()
    assert world.verdict().dead == {"bad": 1}


def test_paused_process_stops_itself_and_adds_nothing(client: Client, namespace: str, clock: Clock) -> None:
    world = World(client, namespace, seed=9, workers=1, clock=clock)
    world.begin()
    world.add("c0", Kind.LONG)
    paused = world.alive["sim/0"]
    paused.turn()
    world.pause("sim/0")
    while not world.verdict().finals["sim/0", "c0"]:
        world.alive["sim/0"].turn()
    while paused in world.paused:  # it goes on with c0, and is told at its next commit
        world.guarded(paused, paused.turn)
    assert paused.fenced
    world.settle()
    world.judge()


def test_late_commit_after_the_successor_registered_adds_nothing(client: Client, namespace: str, clock: Clock) -> None:
    world = World(client, namespace, seed=9, workers=1, clock=clock)
    world.begin()
    world.add("c0", Kind.SHORT)
    first = world.alive["sim/0"]
    first.turn()
    while not first.line.late:
        world.strike = (world.calls + 1, "late")
        first.turn()
    assert not world.verdict().finals
    world.bury(first)
    world.alive["sim/0"].turn()
    first.line.deliver_late()
    assert not world.verdict().finals
    world.settle()
    world.judge()
