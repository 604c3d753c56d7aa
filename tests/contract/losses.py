"""Random histories in which the server itself forgets: all, one stream, a checkpoint, or the tail of everything."""

from __future__ import annotations

from kvbus.protocol.codec import decode_entry
from kvbus.protocol.results import CommandResult, Status
from kvbus.streams.subscription import message_id
from tests.contract.simulator import Kind, World

MAX_REOPENS_PER_LOSS = 8


class LossyWorld(World):
    """A world whose server loses history now and then. Processes that stood still at that moment are gone."""

    loses_history = True
    loss_rate = 0.06

    def begin(self) -> None:
        self.losses = 0
        self.last_loss = ""
        self.excused: set[tuple[str, str]] = set()
        """Written while the server did not know the worker: no result is owed."""
        self.snapshot: dict[bytes, bytes] = {}
        super().begin()

    def step(self) -> None:
        if self.rng.random() < 0.1 or not self.snapshot:
            self.snapshot = {key: self.client.dump(key) for key in self._keys()}
        if self.rng.random() < self.loss_rate:
            self.lose(self.rng.choice(["all", "commands", "checkpoint", "tail"]))
        super().step()

    def settle(self) -> None:
        """Heartbeats, and the readers' look at their place, let idle workers know as well."""
        self.strike = None
        for life in list(self.alive.values()):
            life.line.fault_rate = life.line.kill_rate = 0.0
            if life.opened:
                self.guarded(life, life.renew)
        self.clock.now += 60
        super().settle()

    def lose(self, what: str) -> None:
        """all: as FLUSHALL. tail: as a failover to a replica that was behind: everything as it was a while ago."""
        self.losses += 1
        self.last_loss = what
        for life in [*self.paused, *self.ended, *(self.alive.values() if what == "tail" else ())]:
            life.line.late.clear()  # a call to the old master does not come to the new one
        for paused in list(self.paused):
            self.bury(paused)
        if what == "commands":
            self.client.delete(self.keys.commands)
        elif what == "checkpoint":
            name = self.rng.choice(self.names)
            self.client.delete(self.keys.worker(name))
            self.excused |= {(name, own_id) for own_id in self.kinds}
        else:
            for key in self._keys():
                self.client.delete(key)
            if what == "tail":
                for key, dump in self.snapshot.items():
                    # a heartbeat goes on to lapse on the new master
                    self.client.restore(key, 5_000 if b":live:" in key else 0, dump)

    def write(self, own_id: str) -> None:
        for name in self.names:
            known = self.client.exists(self.keys.worker(name)) and self.client.hexists(self.keys.workers, name)
            if not known:
                self.excused.add((name, own_id))
        super().write(own_id)

    def _keys(self) -> list[bytes]:
        return sorted(self.client.scan_iter(match=self.keys.prefix + "*", count=1000))

    def judge(self) -> None:
        """What holds within the history that the server has in the end. Raises AssertionError."""
        finals = self.verdict().finals
        told = {(message_id(entry_id.decode(), fields)) for entry_id, fields in self.client.xrange(self.keys.commands)}
        for (name, own_id), results in finals.items():
            assert len(results) <= 1, f"{name} {own_id} ({self.kinds[own_id]}): told {len(results)} times"
        for name in self.names:
            for own_id in told:
                if (name, own_id) not in self.excused:
                    results = finals.get((name, own_id), [])
                    assert results, f"{name} {own_id} ({self.kinds[own_id]}): no final result"
                    self._judge_status(own_id, results[0])
            assert self.client.hget(self.keys.worker(name), "pending") == b"", f"{name} still has commands in hand"
        for life in [*self.alive.values(), *self.ended]:
            twice = [own_id for own_id, count in life.executed.items() if count > 1]
            assert not twice, f"carried out twice in one life: {twice}"
            assert life.reopened <= MAX_REOPENS_PER_LOSS * self.losses, f"reopened {life.reopened} times"

    def _judge_status(self, own_id: str, result: CommandResult) -> None:
        code = result.error.code if result.error is not None else ""
        if self.kinds[own_id] is Kind.BAD:
            assert result.status is Status.REJECTED or code == "history_lost"
        elif self.kinds[own_id] is Kind.KILLER:
            assert code in ("poison", "history_lost"), f"{own_id} kills: {result}"
        else:
            assert result.status is Status.DONE or code in ("poison", "history_lost"), f"{own_id}: {result}"

    def gaps(self) -> list[str]:
        """The reasons of all gaps that workers have told of."""
        found = []
        for entry_id, fields in self.client.xrange(self.keys.events):
            if fields[b"type"] == b"worker.gap":
                found.append(str(getattr(decode_entry(entry_id, fields).message, "reason", "")))
        return found
