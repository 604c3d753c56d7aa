"""Log lines as JSON on stderr, written by a thread: a log that nobody reads must not stop the event loop."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import sys
from collections.abc import Iterator

import msgspec

from kvbus.facade.guard import access_log

QUEUE = 10_000


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Access lines are JSON already."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == access_log.name:
            return message
        line = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "log": record.name,
            "message": message,
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _Dropping(logging.handlers.QueueHandler):
    """Drops what does not fit, and says so once there is room again."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """As it is: it stays in this process, and the formatter wants the trace apart from the message."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self.dropped:
                text = f"{self.dropped} log lines dropped: stderr was not read"
                self.queue.put_nowait(
                    logging.makeLogRecord({"name": "kvbus.facade", "levelname": "WARNING", "msg": text})
                )
                self.dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


@contextlib.contextmanager
def json_logs() -> Iterator[None]:
    """Send everything that is logged to stderr until the end of the block."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE)
    to_queue = _Dropping(lines)
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setFormatter(JsonFormatter())
    listener = logging.handlers.QueueListener(lines, to_stderr)
    root = logging.getLogger()
    level, access_level = root.level, access_log.level
    root.setLevel(logging.WARNING)
    access_log.setLevel(logging.INFO)
    root.addHandler(to_queue)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(to_queue)
        root.setLevel(level)
        access_log.setLevel(access_level)
        listener.stop()
