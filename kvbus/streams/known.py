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
    rev: int | None = None
    """The checkpoint's revision that came with the result; None until it is sent."""
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
        self._remember(message_id, _Known(True, None, result))
        self._results[message_id] = None
        self._results.move_to_end(message_id)
        if len(self._results) > REMEMBER_RESULTS:
            oldest, _ = self._results.popitem(last=False)
            if oldest in self._ids:
                self._ids[oldest].result = None

    def sent(self, message_id: str, rev: int) -> None:
        """Its final result is on the way, in the step that makes this revision."""
        known = self._ids.get(message_id)
        if known is not None:
            known.rev = rev

    def mark_answered(self, message_id: str, rev: int) -> None:
        """The present history holds this worker's final result, at this revision or an earlier one."""
        known = self._ids.get(message_id)
        if known is None:
            self._remember(message_id, _Known(True, rev))
        else:
            known.answered, known.rev = True, rev

    def answered(self, message_id: str) -> bool:
        known = self._ids.get(message_id)
        return known is not None and known.answered

    def result(self, message_id: str) -> CommandResult | None:
        """The result of a command that was carried out, while it is remembered."""
        known = self._ids.get(message_id)
        return known.result if known is not None else None

    def forget_answers(self, after: int) -> None:
        """The server has lost every answer that was sent with a later revision than this; -1: all of them."""
        for known in self._ids.values():
            known.answered = known.answered and (known.rev is None or known.rev <= after)

    def _remember(self, message_id: str, known: _Known) -> None:
        self._ids[message_id] = known
        self._ids.move_to_end(message_id)
        if len(self._ids) > REMEMBER_IDS:
            self._ids.popitem(last=False)
