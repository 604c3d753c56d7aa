"""The commands that a worker has met, so that none is carried out twice and every one is answered once. Pure."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from kvbus.protocol.results import CommandResult

REMEMBER_IDS = 16_384
REMEMBER_RESULTS = 1_000


class _Known(msgspec.Struct):
    answered: bool = False
    """Its final result stands in the present history, or is on its way there."""
    result: CommandResult | None = None


class KnownCommands:
    """Message ids of the newest commands, and the newest results. Bounded; not safe for threads by itself."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, _Known] = OrderedDict()
        self._results: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._ids

    def begin(self, message_id: str) -> None:
        """Taken, not answered."""
        self._remember(message_id, _Known())

    def answer(self, message_id: str, result: CommandResult) -> None:
        """Answered in the present history; the result is kept for a while."""
        self._remember(message_id, _Known(True, result))
        self._results[message_id] = None
        self._results.move_to_end(message_id)
        if len(self._results) > REMEMBER_RESULTS:
            oldest, _ = self._results.popitem(last=False)
            if oldest in self._ids:
                self._ids[oldest].result = None

    def mark_answered(self, message_id: str) -> None:
        """The present history holds this worker's final result."""
        known = self._ids.get(message_id)
        if known is None:
            self._remember(message_id, _Known(True))
        else:
            known.answered = True

    def answered(self, message_id: str) -> bool:
        known = self._ids.get(message_id)
        return known is not None and known.answered

    def result(self, message_id: str) -> CommandResult | None:
        """The result of a command that was carried out, while it is remembered."""
        known = self._ids.get(message_id)
        return known.result if known is not None else None

    def new_history(self) -> None:
        """Nothing is answered any more: the server holds another history."""
        for known in self._ids.values():
            known.answered = False

    def _remember(self, message_id: str, known: _Known) -> None:
        self._ids[message_id] = known
        self._ids.move_to_end(message_id)
        if len(self._ids) > REMEMBER_IDS:
            self._ids.popitem(last=False)
