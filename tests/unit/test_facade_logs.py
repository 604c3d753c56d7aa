"""Log lines are JSON, and a log that nobody reads holds nobody up."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from kvbus.facade import logs
from kvbus.facade.guard import access_log


class Blocked(io.StringIO):
    """A stderr whose reader has stopped, until it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.reached = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.goes_on.wait(30)
        return super().write(text)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_line_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with logs.json_logs():
        access_log.info("%s", '{"status":200}')
        try:
            raise ValueError("what was wrong")
        except ValueError:
            logging.getLogger("kvbus.somewhere").exception("it broke: %s", 'with "quotes"\nand lines')
        logging.getLogger("kvbus.somewhere").info("not worth a line")
    access, error = lines(stderr)
    assert access == {"status": 200}
    assert (error["level"], error["log"]) == ("error", "kvbus.somewhere")
    assert error["message"] == 'it broke: with "quotes"\nand lines'
    assert "ValueError: what was wrong" in str(error["trace"])


def test_what_does_not_fit_is_dropped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Blocked()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(logs, "QUEUE", 10)
    with logs.json_logs():
        access_log.info("%s", '{"n":0}')
        assert stderr.reached.wait(20)
        for number in range(1, 31):
            access_log.info("%s", json.dumps({"n": number}))  # returns, though nobody reads
        stderr.goes_on.set()
        while stderr.getvalue().count("\n") < 11:
            pass
        access_log.info("%s", '{"n":99}')
    told = lines(stderr)
    assert [line["n"] for line in told if "n" in line] == [*range(11), 99]
    assert [line["message"] for line in told if "message" in line] == ["20 log lines dropped: stderr was not read"]


def test_afterwards_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    before = (logging.getLogger().level, access_log.level, list(logging.getLogger().handlers), threading.active_count())
    with logs.json_logs():
        pass
    after = (logging.getLogger().level, access_log.level, list(logging.getLogger().handlers), threading.active_count())
    assert after == before
