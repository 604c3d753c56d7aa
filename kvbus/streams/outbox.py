"""What a worker has to commit, and the step that is on its way to the server. Pure; not safe for threads by itself."""

from __future__ import annotations

from typing import NamedTuple

from kvbus.protocol.results import CommandResult
from kvbus.streams.checkpoint import Append, Checkpoint, Commit
from kvbus.streams.known import KnownCommands


class Step(NamedTuple):
    """A commit that was sent, and what it was made of."""

    commit: Commit
    results: list[CommandResult]
    appends: list[Append]


class Outbox:
    """Results and other entries that wait, one step on its way, and the revision that the server has acknowledged."""

    def __init__(self, known: KnownCommands) -> None:
        self.results: list[CommandResult] = []
        self.appends: list[Append] = []
        self.dirty = False
        """Something waits: these, or a place that has moved."""
        self.in_flight: Step | None = None
        self.rev = 0
        self._top_rev = 0
        self._known = known

    def add(self, result: CommandResult) -> None:
        self.results.append(result)
        self.dirty = True

    def queue(self, append: Append) -> None:
        self.appends.append(append)
        self.dirty = True

    @property
    def next_rev(self) -> int:
        """Above all revisions that this life has used: no step that was given up can ever fit again."""
        return self._top_rev + 1

    def send(self, commit: Commit) -> Step:
        """All that waits goes into this step, which is sent until the server has answered."""
        for result in self.results:
            if result.status.final:
                self._known.sent(result.command_id, commit.new_rev)
        self.in_flight = Step(commit, self.results, self.appends)
        self._top_rev = commit.new_rev
        self.results, self.appends, self.dirty = [], [], False
        return self.in_flight

    def acknowledged(self, step: Step) -> None:
        self.in_flight, self.rev = None, step.commit.new_rev

    def settle(self, found: Checkpoint, on_server: set[str]) -> None:
        """After history was lost: go on from the server's revision, and see what became of the step on its way.

        on_server: commands whose final result stands there, as far as that had to be looked up.
        """
        self.rev, self._top_rev = found.rev, max(self._top_rev, found.rev)
        if self.in_flight is None:
            return
        commit, results, appends = self.in_flight
        if found.rev == commit.old_rev and not found.brought_back:
            return  # not applied yet, but it may be at any moment: it is sent again as it is
        self.in_flight = None
        if found.rev == commit.new_rev and not found.brought_back:
            return
        again = [result for result in results if result.command_id not in on_server]
        for result in again:
            if result.status.final:
                self._known.answer(result.command_id, result)
        self.results, self.appends = [*again, *self.results], [*appends, *self.appends]
