"""Which entry a worker died on: how often each was begun, where an earlier life did not end in good order. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvbus.streams.checkpoint import Checkpoint
from kvbus.streams.position import id_key

MAX_CRASHES = 3
"""The third crash on the same entry sets it aside."""


class Suspicion:
    """After an unclean stop commands come one at a time, and each beginning is put on record before it is made."""

    def __init__(self) -> None:
        self.attempts: dict[str, int] = {}
        """Entry id to how often it was begun, for those in hand."""
        self.limit = ""
        """Entries up to this id may have been begun in a life that ended before it put them on record."""
        self._unclean = False

    def inherit(self, found: Checkpoint, limit: str) -> None:
        self._unclean = not (found.clean or found.created)
        self.attempts = dict(found.attempts)
        self.limit = limit

    def covers(self, cursor: str) -> bool:
        """Whether the next entry may have been begun before."""
        return bool(self.limit) and id_key(cursor) < id_key(self.limit)

    def begun(self, entry_id: str) -> int:
        """How often an entry was begun that an earlier life has left in hand.

        Not on record: once, in a life that had no reason to be careful; or it was left in good order.
        """
        return self.attempts.get(entry_id, int(self._unclean))

    def begin(self, entry_id: str, begun: int) -> int:
        """Which attempt this is. Put on record only where there is a reason."""
        if begun:
            self.attempts[entry_id] = begun + 1
        return begun + 1

    def clear(self, entry_id: str) -> None:
        """It was survived."""
        self.attempts.pop(entry_id, None)

    def leave(self, waiting: Iterable[str]) -> None:
        """A clean stop: what this life began did no harm; what it did not come to stays under suspicion."""
        kept = {entry_id: self.begun(entry_id) for entry_id in waiting}
        attempts = kept | {entry_id: n - 1 for entry_id, n in self.attempts.items() if entry_id not in kept}
        self.attempts = {entry_id: n for entry_id, n in attempts.items() if n}
