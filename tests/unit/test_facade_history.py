"""Commands and results found again in the streams alone, by one backward scan."""

from __future__ import annotations

import json

import pytest

from kvbus.history import command_at, find_command, find_latest, results_of
from kvbus.protocol.codec import encode_entry, encode_json_entry
from kvbus.protocol.commands import Evict, Prefetch
from kvbus.protocol.results import CommandResult, Results, Status
from kvbus.streams.log import Log
from tests.servers import Server


@pytest.fixture
def log(server: Server, namespace: str) -> Log:
    return Log(server.bus(namespace))


def answer(log: Log, worker: str, *results: tuple[str, Status]) -> None:
    message = Results(
        worker=worker,
        instance="a",
        rank=0,
        epoch=1,
        results=tuple(CommandResult(command_id=own_id, type="evict", status=status) for own_id, status in results),
    )
    log.append(log.bus.keys.results, encode_entry(message, message_id=f"{worker}-{results[0][0]}"))


def test_a_command_is_found_by_its_id(log: Log) -> None:
    key = log.bus.keys.commands
    for number in range(200):  # more than a page
        log.append(key, encode_entry(Evict(chunk_hashes=(number + 1,)), message_id=f"id-{number}"))
    found = find_command(log, "id-3")
    assert found is not None
    assert found.command == Evict(chunk_hashes=(4,))
    assert command_at(log, found.entry_id, "id-3") == found
    assert command_at(log, found.entry_id, "another") is None
    assert find_command(log, "id-200") is None
    assert find_command(log, "") is None


def test_a_command_without_an_id_goes_by_its_entry(log: Log) -> None:
    entry_id = log.append(log.bus.keys.commands, encode_json_entry(Evict(chunk_hashes=(1,))))
    found = find_command(log, entry_id)
    assert found is not None
    assert (found.command_id, found.entry_id) == (entry_id, entry_id)
    assert find_command(log, "99999999999999999999-0") is None


def test_one_that_nobody_can_decode_is_found_too(log: Log) -> None:
    log.append(log.bus.keys.commands, {b"type": b"evict", b"id": b"bad", b"body": b"\xff"})
    found = find_command(log, "bad")
    assert found is not None
    assert (found.type, found.command) == ("evict", None)


def test_the_latest_prefetch_with_a_label(log: Log) -> None:
    key = log.bus.keys.commands
    first = Prefetch(chunk_hashes=(1,), lookup_id="turn")
    second = Prefetch(chunk_hashes=(2,), lookup_id="turn")
    log.append(key, encode_entry(first, message_id="1"))
    log.append(key, encode_json_entry(second, message_id="2"))
    log.append(key, encode_entry(Prefetch(chunk_hashes=(3,), lookup_id="turning"), message_id="3"))
    log.append(key, encode_entry(Evict(chunk_hashes=(4,), lookup_id="turn"), message_id="4"))
    found = find_latest(log, "turn")
    assert found is not None
    assert found.command_id == "2"
    assert find_latest(log, "tur") is None


@pytest.mark.parametrize("label", ["häkchen", 'quote "', "line\nbreak", "\\u0041", "x" * 1024])
def test_labels_that_json_escapes(log: Log, label: str) -> None:
    key = log.bus.keys.commands
    text = json.dumps({"chunk_hashes": ["1"], "lookup_id": label})
    log.append(key, {b"type": b"prefetch", b"id": b"escaped", b"json": text.encode()})
    found = find_latest(log, label)
    assert found is not None
    assert found.command_id == "escaped"


def test_results_final_before_interim_whatever_their_order(log: Log) -> None:
    log.append(log.bus.keys.commands, encode_entry(Evict(chunk_hashes=(1,)), message_id="c"))
    answer(log, "a/0", ("other", Status.DONE), ("c", Status.DEFERRED))
    answer(log, "a/1", ("c", Status.DEFERRED))
    answer(log, "a/0", ("c", Status.PARTIAL), ("more", Status.DONE))
    answer(log, "a/2", ("c", Status.DEFERRED), ("c", Status.DONE))
    answer(log, "a/3", ("cc", Status.DONE))
    log.append(log.bus.keys.results, {b"type": b"results", b"body": b"\xffc"})  # a stranger's
    log.append(log.bus.keys.results, encode_entry(Evict(chunk_hashes=(1,)), message_id="c"))
    found = find_command(log, "c")
    assert found is not None
    statuses = {name: given.result.status for name, given in results_of(log, found).items()}
    assert statuses == {"a/0": Status.PARTIAL, "a/1": Status.DEFERRED, "a/2": Status.DONE}
