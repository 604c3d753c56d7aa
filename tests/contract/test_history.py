"""What a worker does when the server has lost history: it notices, says so once, goes on, and answers each once."""

from __future__ import annotations

import os

import pytest

from kvbus.errors import BusUnavailable, Fenced, HistoryLost
from kvbus.streams.checkpoint import Commit, commit
from kvbus.streams.connection import Bus
from tests.conftest import MakeServer
from tests.contract.line import Clock
from tests.contract.losses import LossyWorld
from tests.contract.processes import (
    NAME,
    QUICK,
    Namespace,
    StartProcess,
    answered,
    await_blocked,
    calls,
    check_place,
    done,
    opened,
    work,
)
from tests.contract.simulator import prime
from tests.servers import RealServer, Server, eventually

HISTORIES = int(os.environ.get("KVBUS_TEST_HISTORIES", "1"))
"""Multiplies the number of random histories, for a long run by hand."""


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


def lose_the_reply(bus: Bus, step: Commit, *line: object) -> None:
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
