"""One JSON file a turn: what a session held before and after, the difference, and the commands that followed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from kvbus.memory.ledger import Turn
from kvbus.metrics import Counters, RateLimitedLog
from kvbus.protocol.events import RequestFinished
from kvbus.protocol.hashes import ChunkHash, format_hash

_log = logging.getLogger(__name__)
_PRUNE_EVERY = 50


class DebugFiles:
    """Writes the files, named after the event's entry, and keeps the newest `keep`. Trouble is counted, not raised."""

    def __init__(self, directory: str | Path, keep: int, counters: Counters) -> None:
        self.directory = Path(directory)
        self._keep = keep
        self._counters = counters
        self._written = 0
        self._limited = RateLimitedLog(_log)

    def write(self, entry_id: str, event: RequestFinished, turn: Turn) -> Path | None:
        """The file, or None if it could not be written."""
        path = self.directory / f"turn-{entry_id}.json"
        data = msgspec.json.format(msgspec.json.encode(describe(entry_id, event, turn)), indent=2)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
            if self._written % _PRUNE_EVERY == 0:
                self._prune()
        except OSError as error:
            self._counters.add("debug_failed")
            self._limited.warning("debug", "debug file %s cannot be written: %s", path, error)
            return None
        self._written += 1
        return path

    def _prune(self) -> None:
        files = sorted(self.directory.glob("turn-*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[: max(0, len(files) - self._keep)]:
            file.unlink(missing_ok=True)


def describe(entry_id: str, event: RequestFinished, turn: Turn) -> dict[str, Any]:
    """What a file holds, hashes as text."""
    before = _texts(turn.chunks_before)
    after = _texts(dict.fromkeys(event.chunk_hashes)) if event.chunk_hashes else before
    was, now = set(before), set(after)
    return {
        "entry_id": entry_id,
        "request_id": event.request_id,
        "external_id": event.external_id,
        "session": turn.session,
        "context": event.context,
        "finished_at_ms": event.finished_at_ms,
        "missed_events": turn.missed,
        "before": before,
        "after": after,
        "diff_added": [text for text in after if text not in was],
        "diff_deleted": [text for text in before if text not in now],
        "commands": [
            {"form": item.form, "command_id": item.command_id, "chunk_hashes": _texts(item.chunk_hashes)}
            for item in turn.commands
        ],
    }


def _texts(hashes: tuple[ChunkHash, ...] | dict[ChunkHash, None]) -> list[str]:
    return [format_hash(item) for item in hashes]
