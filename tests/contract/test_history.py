"""What a worker does when the server has lost history: it notices, says so once, goes on, and answers each once."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus.embedded import HOST
from kvbus.errors import BusUnavailable, Fenced, HistoryLost
from kvbus.protocol.codec import decode_entry, encode_entry
from kvbus.protocol.commands import Ping
from kvbus.protocol.events import WorkerGap
from kvbus.protocol.results import CommandResult, Results, Status
from kvbus.streams.checkpoint import Commit, Taken, commit
from kvbus.streams.connection import Bus, Client
from kvbus.streams.keys import Keys
from kvbus.streams.registry import Registration
from kvbus.streams.subscription import message_id
from kvbus.streams.worker_log import WorkerLog
from tests.conftest import MakeServer
from tests.contract.losses import LossyWorld
from tests.contract.simulator import Clock, clocked, prime
from tests.proxy import Proxy
from tests.servers import RealServer, Server, eventually, replica_of

NAME = "node/0"
QUICK = {"block_ms": 300, "heartbeat_ms": 100, "live_ms": 400, "connect_timeout_ms": 500, "reply_timeout_ms": 1_000}
HISTORIES = int(os.environ.get("KVBUS_TEST_HISTORIES", "1"))
"""Multiplies the number of random histories, for a long run by hand."""


class Namespace:
    """What the tests write and read beside the workers."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.keys = Keys(namespace)

    def command(self, own_id: str) -> str:
        entry_id: bytes = self.client.xadd(self.keys.commands, encode_entry(Ping(), message_id=own_id))
        return entry_id.decode()

    def finals(self, worker: str = NAME) -> Counter[str]:
        """How often each command was answered for good by one worker."""
        found: Counter[str] = Counter()
        for entry_id, fields in self.client.xrange(self.keys.results):
            message = decode_entry(entry_id, fields).message
            assert isinstance(message, Results)
            if message.worker == worker:
                found.update(result.command_id for result in message.results if result.status.final)
        return found

    def gaps(self) -> list[WorkerGap]:
        """All that workers told of what they missed, repeats of one telling left out."""
        found: dict[str, WorkerGap] = {}
        for entry_id, fields in self.client.xrange(self.keys.events):
            message = decode_entry(entry_id, fields).message
            if isinstance(message, WorkerGap):
                found[message_id(entry_id.decode(), fields)] = message
        return list(found.values())


class Process:
    """A worker process's loop, in a thread: takes commands, answers them at once, reopens when history is lost."""

    def __init__(self, bus: Bus, name: str = NAME) -> None:
        instance, rank = name.split("/")
        self.log = WorkerLog(bus, name, Registration(instance=instance, rank=int(rank)))
        self.executed: list[str] = []
        self.lost = self.unavailable = 0
        self.fenced = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker")

    def start(self) -> Process:
        self._thread.start()
        eventually(lambda: self.log.epoch, what="the worker's registration")
        return self

    def _run(self) -> None:
        opened = lost = False
        while not self._stop.is_set():
            try:
                if not opened:
                    opened = not isinstance(self.log.open(), Taken)
                elif lost:
                    self.log.reopen()
                    lost = False
                else:
                    self._round()
            except HistoryLost:
                self.lost += 1
                lost = True
                self._stop.wait(0.02)
            except Fenced:
                self.fenced = True
                return
            except BusUnavailable:
                self.unavailable += 1
                self._stop.wait(0.02)

    def _round(self) -> None:
        self.log.renew()
        for task in self.log.read():
            self.executed.append(task.envelope.id)
            self.log.finish(task.entry_id, done(task.envelope.id))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.log.disconnect()


def done(own_id: str) -> CommandResult:
    return CommandResult(command_id=own_id, type="ping", status=Status.DONE)


StartProcess = Callable[[Bus], Process]


@pytest.fixture
def start_process() -> Iterator[StartProcess]:
    started: list[Process] = []

    def start(bus: Bus) -> Process:
        process = Process(bus)
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.stop()


def calls(client: Client, *names: str) -> int:
    """How often the server was called so far."""
    stats: dict[str, Any] = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in names)


def await_blocked(client: Client) -> None:
    eventually(lambda: client.info("clients")["blocked_clients"] >= 1, what="the blocked read")


def answered(space: Namespace, own_id: str) -> None:
    eventually(lambda: space.finals()[own_id], what=f"a final result of {own_id}")


# -- everything lost -----------------------------------------------------------------------------------------------


def test_flush_while_a_read_waits_is_noticed_and_told_once(
    own_real_server: RealServer, namespace: str, start_process: StartProcess
) -> None:
    client = own_real_server.client()
    space = Namespace(client, namespace)
    for number in range(3):
        space.command(f"early{number}")
    process = start_process(own_real_server.bus(namespace, **QUICK))
    space.command("c0")
    answered(space, "c0")
    epoch = process.log.epoch
    await_blocked(client)
    before = calls(client, "evalsha", "xinfo|stream")
    client.flushall()
    for number in range(1, 4):
        space.command(f"c{number}")
    for number in range(1, 4):
        answered(space, f"c{number}")
    eventually(lambda: space.gaps(), what="the gap")
    assert calls(client, "evalsha", "xinfo|stream") - before < 60  # it does not spin
    space.command("c0")  # its issuer missed the answer, which is gone with the history
    answered(space, "c0")
    assert space.finals() == {"c0": 1, "c1": 1, "c2": 1, "c3": 1}
    assert sorted(process.executed) == ["c0", "c1", "c2", "c3"]
    (gap,) = space.gaps()
    assert gap.reason.startswith("history_lost")
    assert gap.missed is None
    assert process.log.epoch == epoch == gap.epoch  # the process lives, and its tiers are what they were
    assert client.hexists(space.keys.workers, NAME)


@pytest.mark.parametrize("kind", ["valkey", "redis7"])
def test_restart_without_persistence(
    kind: str, start_server: MakeServer, namespace: str, start_process: StartProcess
) -> None:
    server = start_server(kind)
    assert isinstance(server, RealServer)
    space = Namespace(server.client(), namespace)
    process = start_process(server.bus(namespace, **QUICK))
    for number in range(5):
        space.command(f"old{number}")
    answered(space, "old4")
    server.restart()
    space = Namespace(server.client(), namespace)
    eventually(lambda: space.client.hexists(space.keys.workers, NAME), what="the new registration")
    space.command("new")
    answered(space, "new")
    assert space.finals() == {"new": 1}
    eventually(lambda: space.gaps(), what="the gap")
    assert [gap.reason.partition(":")[0] for gap in space.gaps()] == ["history_lost"]
    assert process.lost <= 5
    assert process.executed.count("new") == 1


def test_clean_restart_with_an_append_only_file_is_not_a_loss(
    own_real_server: RealServer, namespace: str, start_process: StartProcess
) -> None:
    space = Namespace(own_real_server.client(), namespace)
    process = start_process(own_real_server.bus(namespace, **QUICK))
    space.command("c0")
    answered(space, "c0")
    own_real_server.restart()
    space = Namespace(own_real_server.client(), namespace)
    space.command("c1")
    answered(space, "c1")
    own_real_server.kill()
    own_real_server.start()
    space = Namespace(own_real_server.client(), namespace)
    space.command("c2")
    answered(space, "c2")
    assert process.executed == ["c0", "c1", "c2"]
    assert space.finals() == {"c0": 1, "c1": 1, "c2": 1}
    assert process.lost == process.log.gaps == 0
    assert space.gaps() == []


# -- one key lost --------------------------------------------------------------------------------------------------


def opened(bus: Bus, name: str = NAME) -> WorkerLog:
    instance, rank = name.split("/")
    log = WorkerLog(bus, name, Registration(instance=instance, rank=int(rank)))
    assert log.open() is None
    return log


def work(log: WorkerLog) -> list[str]:
    """Take and answer all there is, and commit; reopen where history is lost. Returns what was carried out."""
    executed: list[str] = []
    lost = 0
    while True:
        try:
            tasks = log.read(block_ms=0)
        except HistoryLost:
            lost += 1
            assert lost < 4, "it spins"
            log.reopen()
            continue
        for task in tasks:
            executed.append(task.envelope.id)
            log.finish(task.entry_id, done(task.envelope.id))
        if not tasks and not log.dirty:
            return executed


def check_place(log: WorkerLog) -> None:
    """Compare with the server's counters at the next read, as a reader does every few seconds."""
    log.disconnect()


def test_only_the_commands_deleted(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    for number in range(4):
        space.command(f"c{number}")
    assert work(log) == ["c0", "c1", "c2", "c3"]
    space.client.delete(space.keys.commands)
    space.command("c4")
    space.command("c1")  # answered in a stream that still stands
    check_place(log)
    assert work(log) == ["c4"]
    assert space.finals() == {f"c{number}": 1 for number in range(5)}
    assert [gap.reason.partition(":")[0] for gap in space.gaps()] == ["history_lost"]
    assert work(log) == []
    assert len(space.gaps()) == 1


def test_commands_deleted_with_one_in_hand(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    space.command("long")
    (task,) = log.read(block_ms=0)
    log.flush()
    space.client.delete(space.keys.commands)
    space.command("c1")
    check_place(log)
    assert work(log) == ["c1"]
    log.finish(task.entry_id, done("long"))
    assert work(log) == []
    assert space.finals() == {"long": 1, "c1": 1}


def test_only_the_checkpoint_of_a_living_worker_deleted(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    space.command("c0")
    assert work(log) == ["c0"]
    space.command("c1")
    (task,) = log.read(block_ms=0)
    space.client.delete(space.keys.worker(NAME))
    space.command("c2")
    with pytest.raises(HistoryLost):
        log.renew()
    log.finish(task.entry_id, done("c1"))
    assert work(log) == ["c2"]
    assert space.finals() == {"c0": 1, "c1": 1, "c2": 1}
    assert space.gaps() == []  # nothing was missed
    log.renew()


def test_checkpoint_deleted_after_a_commit_whose_reply_was_lost(
    server: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    space.command("c0")
    (task,) = log.read(block_ms=0)
    log.finish(task.entry_id, done("c0"))
    with monkeypatch.context() as patch:
        patch.setattr("kvbus.streams.worker_log.commit", lose_the_reply)
        with pytest.raises(BusUnavailable):
            log.flush()
    space.client.delete(space.keys.worker(NAME))
    assert work(log) == []
    assert space.finals() == {"c0": 1}


def lose_the_reply(bus: Bus, step: Commit) -> None:
    commit(bus, step)
    raise BusUnavailable("the reply is lost")


def test_checkpoint_deleted_while_the_worker_is_away(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    first = opened(server.bus(namespace))
    space.command("c0")
    assert work(first) == ["c0"]
    space.client.delete(space.keys.live(NAME), space.keys.worker(NAME))
    space.command("missed")
    successor = opened(server.bus(namespace))
    space.command("c0")  # a late duplicate
    space.command("c1")
    assert work(successor) == ["c1"]
    assert space.finals() == {"c0": 1, "c1": 1}
    (gap,) = space.gaps()
    assert "the checkpoint is gone" in gap.reason


# -- trimmed and deleted -------------------------------------------------------------------------------------------


def test_trimmed_past_the_cursor_is_told_once_with_its_count_and_range(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    read = space.command("c0")
    assert work(log) == ["c0"]
    ids = [space.command(f"c{number}") for number in range(1, 11)]
    space.client.xtrim(space.keys.commands, maxlen=4, approximate=False)
    check_place(log)
    assert work(log) == ["c7", "c8", "c9", "c10"]
    (gap,) = space.gaps()
    assert (gap.missed, gap.after, gap.before) == (6, read, ids[6])
    assert gap.reason.startswith("trimmed")
    check_place(log)
    space.command("c11")
    assert work(log) == ["c11"]
    assert len(space.gaps()) == log.gaps == 1


def test_all_trimmed_unread(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    work(log)
    ids = [space.command(f"c{number}") for number in range(3)]
    space.client.xtrim(space.keys.commands, maxlen=0, approximate=False)
    check_place(log)
    assert work(log) == []
    (gap,) = space.gaps()
    assert (gap.missed, gap.after, gap.before) == (3, "0-0", ids[2])
    space.command("c3")
    check_place(log)
    assert work(log) == ["c3"]
    assert len(space.gaps()) == 1


def test_trimmed_while_the_worker_was_away(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    space.command("c0")
    work(log)
    log.close()
    for number in range(1, 6):
        space.command(f"c{number}")
    space.client.xtrim(space.keys.commands, maxlen=2, approximate=False)
    successor = opened(server.bus(namespace))
    assert work(successor) == ["c4", "c5"]
    assert [gap.missed for gap in space.gaps()] == [3]


def test_operator_deletes_the_entry_at_the_cursor(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    space.command("c0")
    read = space.command("c1")
    assert work(log) == ["c0", "c1"]
    space.client.xdel(space.keys.commands, read)
    check_place(log)
    assert work(log) == []
    space.command("c2")
    check_place(log)
    assert work(log) == ["c2"]
    assert space.gaps() == []
    assert space.finals() == {"c0": 1, "c1": 1, "c2": 1}


def test_operator_deletes_an_unread_entry(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    space.command("c0")
    work(log)
    gone = space.command("gone")
    space.command("c1")
    space.client.xdel(space.keys.commands, gone)
    check_place(log)
    assert work(log) == ["c1"]
    check_place(log)
    assert work(log) == []
    assert [gap.missed for gap in space.gaps()] == [1]
    assert space.finals() == {"c0": 1, "c1": 1}


# -- the tail lost -------------------------------------------------------------------------------------------------


class Failover:
    """A master, a replica that is promoted while it is behind, and a proxy that moves clients from one to the other."""

    def __init__(self, master: RealServer, replica: RealServer, proxy: Proxy, namespace: str) -> None:
        self.old = Namespace(master.client(), namespace)
        self.new = Namespace(replica.client(), namespace)
        self._replica = replica
        self._proxy = proxy
        settings = msgspec.structs.replace(master.settings(namespace, **QUICK), redis_url=proxy.url)
        self.bus = Bus(settings, client_name="kvbus-test")

    def cut_the_replica_off(self) -> None:
        """What the master takes from now on is the tail that will be lost."""
        sent = self.old.client.info("replication")["master_repl_offset"]
        eventually(lambda: self.new.client.info("replication")["slave_repl_offset"] >= sent, what="the replica in step")
        self.new.client.replicaof("NO", "ONE")

    def switch(self) -> None:
        self._proxy._target = (HOST, self._replica.port)
        self._proxy.cut_once()


@pytest.fixture(params=["valkey", "redis7"])
def failover(
    request: pytest.FixtureRequest, start_server: MakeServer, tmp_path: Path, namespace: str
) -> Iterator[Failover]:
    master = start_server(request.param)
    assert isinstance(master, RealServer)
    with replica_of(master, tmp_path / "replica") as replica, Proxy(HOST, master.port) as proxy:
        failover = Failover(master, replica, proxy, namespace)
        yield failover
        failover.bus.close()


def test_lost_results_are_told_again_and_not_done_again(failover: Failover, start_process: StartProcess) -> None:
    old, new = failover.old, failover.new
    process = start_process(failover.bus)
    old.command("c0")
    answered(old, "c0")
    failover.cut_the_replica_off()
    new.command("c1")  # both have it, as if it had been replicated; what became of it on the old master is lost
    old.client.xadd(old.keys.commands, encode_entry(Ping(), message_id="c1"), id=last_id(new))
    answered(old, "c1")
    assert process.executed == ["c0", "c1"]
    failover.switch()
    answered(new, "c1")  # without a new command: the heartbeat finds that its checkpoint has gone back
    new.command("c2")
    answered(new, "c2")
    assert process.executed == ["c0", "c1", "c2"]
    assert new.finals() == {"c0": 1, "c1": 1, "c2": 1}


def last_id(space: Namespace) -> str:
    (found,) = space.client.xrevrange(space.keys.commands, count=1)
    return str(found[0].decode())


def test_lost_commands_are_reported_and_their_repeats_answered_from_memory(
    failover: Failover, start_process: StartProcess
) -> None:
    old, new = failover.old, failover.new
    process = start_process(failover.bus)
    old.command("c0")
    answered(old, "c0")
    failover.cut_the_replica_off()
    old.command("lost")
    answered(old, "lost")
    failover.switch()
    eventually(lambda: new.gaps(), what="the gap")
    new.command("lost")  # its issuer found no trace of it, and wrote it again
    new.command("c1")
    answered(new, "c1")
    answered(new, "lost")
    assert process.executed == ["c0", "lost", "c1"]
    assert new.finals() == {"c0": 1, "lost": 1, "c1": 1}
    (gap,) = new.gaps()
    assert gap.reason.startswith("history_lost")
    assert not process.fenced


def test_same_id_with_other_content_is_another_history(failover: Failover, start_process: StartProcess) -> None:
    old, new = failover.old, failover.new
    process = start_process(failover.bus)
    old.command("c0")
    answered(old, "c0")
    failover.cut_the_replica_off()
    entry_id = old.command("lost")
    answered(old, "lost")
    new.client.xadd(new.keys.commands, encode_entry(Ping(), message_id="other"), id=entry_id)
    failover.switch()
    answered(new, "other")
    assert process.executed == ["c0", "lost", "other"]
    assert new.finals() == {"c0": 1, "other": 1}


def test_registration_lost_with_the_tail_is_made_again(failover: Failover, start_process: StartProcess) -> None:
    old, new = failover.old, failover.new
    earlier = opened(failover.bus)
    old.command("c0")
    assert work(earlier) == ["c0"]
    failover.cut_the_replica_off()
    old.client.delete(old.keys.live(NAME))  # that process is dead
    earlier.disconnect()
    process = start_process(failover.bus)
    old.command("c1")
    answered(old, "c1")
    failover.switch()
    new.command("c2")
    answered(new, "c2")
    assert not process.fenced  # nobody superseded it: the server went back to the process before it
    assert new.finals()["c2"] == 1
    assert new.client.get(new.keys.live(NAME)) == process.log.owner.encode()


def test_another_process_took_the_name_in_the_new_history(server: Server, namespace: str) -> None:
    space = Namespace(server.client(), namespace)
    log = opened(server.bus(namespace))
    space.command("c0")
    work(log)
    for key in space.client.scan_iter(match=space.keys.prefix + "*"):
        space.client.delete(key)
    other = opened(server.bus(namespace))
    with pytest.raises(Fenced):
        log.renew()
    with pytest.raises(Fenced):
        log.reopen()
    other.renew()


# -- random losses -------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clocked(monkeypatch)


@pytest.mark.parametrize("part", range(2 * HISTORIES))
@pytest.mark.parametrize("kind", ["valkey", "redis7"])
def test_random_losses(request: pytest.FixtureRequest, kind: str, namespace: str, clock: Clock, part: int) -> None:
    client = request.getfixturevalue(kind).client()
    prime(client)
    for seed in range(part * 40, (part + 1) * 40):
        world = LossyWorld(client, f"{namespace}-{seed}", seed, workers=1 + seed % 2, clock=clock)
        try:
            world.run(40, fault_rate=(0, 0.05, 0.1)[seed % 3], kill_rate=(0, 0.02)[seed // 3 % 2])
            world.judge()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            world.clear()
