"""The tree of errors: stable codes, hints for everybody, and a drawing that is true."""

from __future__ import annotations

import re

import pytest

from kvbus import errors
from kvbus.errors import ConfigError, KVBusError, all_errors

CODES = {
    "kvbus": "KVBusError",
    "config": "ConfigError",
    "missing_extra": "MissingExtra",
    "protocol": "ProtocolError",
    "undecodable": "UndecodableEntry",
    "invalid": "InvalidMessage",
    "over_limit": "OverLimit",
    "unknown_type": "UnknownType",
    "poison": "PoisonEntry",
    "bus": "BusError",
    "bus_unavailable": "BusUnavailable",
    "bus_full": "BusFull",
    "bus_refused": "BusRefused",
    "history_lost": "HistoryLost",
    "fenced": "Fenced",
    "worker": "WorkerError",
    "no_workers": "NoWorkers",
    "not_answered": "NotAnswered",
    "overloaded": "Overloaded",
    "engine_failed": "EngineFailed",
    "engine_incompatible": "EngineIncompatible",
    "stopped": "Stopped",
}


def ours() -> list[type[KVBusError]]:
    """Those of the tree itself: tests and users may have added their own."""
    return [cls for cls in all_errors() if cls.__module__ == errors.__name__]


def test_codes_never_change() -> None:
    found = {cls.code: cls.__name__ for cls in ours()}
    assert found | CODES == found  # new ones may come, none may change or go
    assert len(found) == len(ours())


def test_tree_in_the_docstring_is_the_real_one() -> None:
    drawing = errors.__doc__ or ""
    for cls in ours():
        assert re.search(rf"(^|[─ ]){cls.__name__}\b", drawing, re.MULTILINE), cls
    drawn = set(re.findall(r"─ (\w+)", drawing)) | {"KVBusError"}
    assert drawn == {cls.__name__ for cls in ours()}


@pytest.mark.parametrize("cls", ours(), ids=lambda cls: cls.code)
def test_every_error_has_code_message_hint_and_docstring(cls: type[KVBusError]) -> None:
    error = cls("what failed")
    assert str(error) == f"[{cls.code}] what failed"
    assert error.hint.endswith((".", "'", "itself."))
    assert error.hint
    assert cls.__doc__
    assert cls("x", hint="do this").hint == "do this"
    assert cls("x", hint="").hint == ""


def test_errors_are_caught_by_their_family() -> None:
    with pytest.raises(KVBusError):
        raise ConfigError("x")
    for cls in ours():
        assert issubclass(cls, KVBusError)
