"""A replica is promoted that had not seen the newest writes: what was lost is told again, and nothing is done again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvbus.embedded import HOST
from kvbus.protocol.codec import encode_entry
from kvbus.protocol.commands import Ping
from kvbus.streams.connection import Bus
from tests.conftest import MakeServer
from tests.contract.processes import (
    NAME,
    QUICK,
    Namespace,
    StartProcess,
    answered,
    opened,
    work,
)
from tests.proxy import Proxy
from tests.servers import RealServer, eventually, replica_of


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
