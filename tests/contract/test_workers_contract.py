"""Names, fenced checkpoints, membership and readers' places: one behaviour on fakeredis, Valkey 9.1 and Redis 7.0."""

from __future__ import annotations

import json
import time

import msgspec
import pytest

from kvbus.errors import BusRefused, Fenced, HistoryLost
from kvbus.protocol import CommandResult, Ping, Results, Status, decode_entry, encode_entry
from kvbus.protocol.codec import encode_body
from kvbus.streams.checkpoint import (
    Append,
    Checkpoint,
    Commit,
    CommitAnswer,
    Pending,
    Taken,
    commit,
    register,
    renew,
    retire,
)
from kvbus.streams.connection import Bus
from kvbus.streams.issue import Issuer
from kvbus.streams.position import Position
from kvbus.streams.registry import (
    Membership,
    PublisherRegistration,
    Registration,
    beat_publisher,
    encode_registration,
    forget_reader,
    list_readers,
    load_reader,
    prune,
    read_publishers,
    read_stats,
    register_publisher,
    registered_epoch,
    save_reader,
    write_stats,
)
from tests.servers import RealServer, Server, eventually

NAME = "node-a/0"
START = Position("7-3", "where it stands", 42)
REGISTRATION = encode_registration(Registration(instance="node-a", chunk_size=256, tiers=("DDR", "SSD")))


@pytest.fixture
def bus(server: Server, namespace: str) -> Bus:
    return server.bus(namespace)


def begin(bus: Bus, owner: str, *, name: str = NAME, start: Position = START) -> Checkpoint:
    found = register(bus, name, owner, start=start, registration=REGISTRATION)
    assert isinstance(found, Checkpoint)
    return found


def result_append(bus: Bus, command_id: str = "c1", message_id: str = "r1") -> Append:
    result = CommandResult(command_id=command_id, type="ping", status=Status.DONE)
    body = encode_body(Results(worker=NAME, instance="node-a", rank=0, epoch=1, results=(result,)))
    return Append(stream=bus.keys.results, type=Results.TYPE, message_id=message_id, body=body)


def step(bus: Bus, owner: str, old: int, new: int, **values: object) -> Commit:
    fixed = {"name": NAME, "owner": owner, "old_rev": old, "new_rev": new, "position": Position("9-1", "m9", 43)}
    return msgspec.structs.replace(
        Commit(**fixed),  # type: ignore[arg-type]
        **{"appends": (result_append(bus),), **values},
    )


def count(bus: Bus, key: str) -> int:
    length: int = bus.client.xlen(key)
    return length


# -- register ----------------------------------------------------------------------------------------------------


def test_first_registration_begins_at_the_given_place(bus: Bus) -> None:
    found = begin(bus, "o1")
    assert (found.created, found.known, found.clean, found.rev, found.position) == (True, False, False, 0, START)
    assert abs(found.epoch - time.time() * 1000) < 600_000
    assert (found.pending, found.attempts) == ((), {})
    written = json.loads(bus.client.hget(bus.keys.workers, NAME))
    assert (written["epoch"], written["chunk_size"]) == (found.epoch, 256)
    assert 0 < bus.client.pttl(bus.keys.live(NAME)) <= bus.settings.live_ms
    assert bus.client.pttl(bus.keys.worker(NAME)) > 6 * 24 * 3600 * 1000


def test_registering_again_with_the_same_token_changes_nothing(bus: Bus) -> None:
    first = begin(bus, "o1")
    commit(bus, step(bus, "o1", 0, 1))
    again = begin(bus, "o1", start=Position("1-1"))
    assert (again.epoch, again.rev, again.position.cursor) == (first.epoch, 1, "9-1")
    assert (again.created, again.known) == (False, True)


def test_name_of_a_living_process_is_taken(bus: Bus) -> None:
    begin(bus, "o1")
    found = register(bus, NAME, "o2", start=START, registration=REGISTRATION)
    assert isinstance(found, Taken)
    assert 0 < found.lapses_in_ms <= bus.settings.live_ms
    renew(bus, NAME, "o1")  # and nothing of it has changed


def test_successor_takes_a_lapsed_name_with_all_that_was_in_hand(server: Server, namespace: str) -> None:
    bus = server.bus(namespace, heartbeat_ms=50, live_ms=100)
    first = begin(bus, "o1")
    pending = (Pending("8-1", "m\x00ä\n", "evict", "lookup"), Pending("8-2", "m8", "prefetch"))
    commit(bus, step(bus, "o1", 0, 1, pending=pending, attempts={"8-1": 2}))
    successor = eventually(
        lambda: (
            isinstance(found := register(bus, NAME, "o2", start=START, registration=REGISTRATION), Checkpoint) and found
        )
    )
    assert successor.epoch > first.epoch
    assert (successor.rev, successor.position) == (1, Position("9-1", "m9", 43))
    assert (successor.pending, successor.attempts) == (pending, {"8-1": 2})
    assert (successor.clean, successor.created) == (False, False)
    with pytest.raises(Fenced):
        renew(bus, NAME, "o1")
    with pytest.raises(Fenced):
        commit(bus, step(bus, "o1", 1, 2))
    assert count(bus, bus.keys.results) == 1


def test_epoch_rises_even_when_the_clock_does_not(bus: Bus) -> None:
    far = 4_102_444_800_000  # the year 2100: a server whose clock was once wrong
    begin(bus, "o1")
    bus.client.hset(bus.keys.worker(NAME), "epoch", far)
    bus.client.delete(bus.keys.live(NAME))
    assert begin(bus, "o2").epoch == far + 1


# -- renew -------------------------------------------------------------------------------------------------------


def test_renewal_prolongs_the_heartbeat_and_sets_the_clock(bus: Bus) -> None:
    begin(bus, "o1")
    bus.client.pexpire(bus.keys.live(NAME), 500)
    renew(bus, NAME, "o1")
    assert bus.client.pttl(bus.keys.live(NAME)) > 500
    assert bus.clock.known


def test_lapsed_heartbeat_can_be_renewed_while_nobody_has_the_name(bus: Bus) -> None:
    begin(bus, "o1")
    bus.client.delete(bus.keys.live(NAME))
    renew(bus, NAME, "o1")
    assert bus.client.get(bus.keys.live(NAME)) == b"o1"


def test_renewal_fails_where_the_server_forgot_the_worker(bus: Bus) -> None:
    begin(bus, "o1")
    bus.client.delete(bus.keys.worker(NAME))
    with pytest.raises(HistoryLost, match=NAME):
        renew(bus, NAME, "o1")


# -- commit ------------------------------------------------------------------------------------------------------


def test_commit_writes_results_and_moves_the_checkpoint(bus: Bus) -> None:
    begin(bus, "o1")
    assert commit(bus, step(bus, "o1", 0, 1)) == (CommitAnswer.OK, "")
    ((entry_id, fields),) = bus.client.xrange(bus.keys.results)
    envelope = decode_entry(entry_id, fields)
    assert (envelope.id, envelope.type) == ("r1", "results")
    assert begin(bus, "o1").position == Position("9-1", "m9", 43)


def test_commit_whose_reply_was_lost_is_not_written_twice(bus: Bus) -> None:
    begin(bus, "o1")
    sent = step(bus, "o1", 0, 1)
    assert commit(bus, sent) == (CommitAnswer.OK, "")
    for _ in range(3):
        assert commit(bus, sent) == (CommitAnswer.ALREADY, "")
    assert count(bus, bus.keys.results) == 1
    assert commit(bus, step(bus, "o1", 1, 2)) == (CommitAnswer.OK, "")
    assert count(bus, bus.keys.results) == 2


def test_commit_on_a_revision_that_the_server_does_not_hold_is_refused(bus: Bus) -> None:
    begin(bus, "o1")
    commit(bus, step(bus, "o1", 0, 1))
    for old, new in ((2, 3), (5, 6)):
        with pytest.raises(HistoryLost, match="revision 1"):
            commit(bus, step(bus, "o1", old, new))
    assert count(bus, bus.keys.results) == 1


def test_commit_that_others_have_gone_beyond_is_fenced(bus: Bus) -> None:
    begin(bus, "o1")
    commit(bus, step(bus, "o1", 0, 1))
    with pytest.raises(Fenced, match="revision 1"):
        commit(bus, step(bus, "o1", 0, 2))
    assert count(bus, bus.keys.results) == 1


def test_commit_of_a_superseded_process_is_fenced(bus: Bus) -> None:
    begin(bus, "o1")
    bus.client.delete(bus.keys.live(NAME))
    begin(bus, "o2")
    with pytest.raises(Fenced, match=NAME):
        commit(bus, step(bus, "o1", 0, 1))
    assert count(bus, bus.keys.results) == 0
    assert commit(bus, step(bus, "o2", 0, 1)) == (CommitAnswer.OK, "")


def test_commit_after_the_server_forgot_everything_is_refused(bus: Bus) -> None:
    with pytest.raises(HistoryLost, match="does not know"):
        commit(bus, step(bus, "o1", 0, 1))
    assert count(bus, bus.keys.results) == 0


def test_commit_that_cannot_write_results_does_nothing(bus: Bus) -> None:
    begin(bus, "o1")
    bus.client.set(bus.keys.results, "not a stream")
    with pytest.raises(BusRefused, match="WRONGTYPE"):
        commit(bus, step(bus, "o1", 0, 1))
    bus.client.delete(bus.keys.results)
    found = begin(bus, "o1")
    assert (found.rev, found.position) == (0, START)
    assert commit(bus, step(bus, "o1", 0, 1)) == (CommitAnswer.OK, "")


@pytest.mark.parametrize("stream", ["dead", "events"])
def test_results_do_not_wait_for_letters_that_cannot_be_written(bus: Bus, stream: str) -> None:
    key = bus.keys.streams[stream]
    begin(bus, "o1")
    bus.client.set(key, "not a stream")
    letter = Append(stream=key, type=stream, message_id="d1", body=b"\x80")
    answer, unwritten = commit(bus, step(bus, "o1", 0, 1, appends=(letter, result_append(bus))))
    assert answer is CommitAnswer.OK
    assert key in unwritten
    assert count(bus, bus.keys.results) == 1


def test_refused_entry_becomes_one_dead_letter_however_many_refuse_it(bus: Bus) -> None:
    for rank in range(3):
        name, owner = f"node-a/{rank}", f"o{rank}"
        begin(bus, owner, name=name)
        letters = tuple(
            Append(stream=bus.keys.dead, type="dead", message_id=f"d{rank}{entry}", body=b"\x80", refuse_once=entry)
            for entry in ("commands|7-1", "commands|7-2")
        )
        commit(bus, step(bus, owner, 0, 1, name=name, appends=(*letters, result_append(bus, message_id=f"r{rank}"))))
    assert [fields[b"id"] for _, fields in bus.client.xrange(bus.keys.dead)] == [b"d0commands|7-1", b"d0commands|7-2"]
    assert count(bus, bus.keys.results) == 3


def test_commit_caps_what_it_appends_to(bus: Bus) -> None:
    begin(bus, "o1")
    for rev in range(30):
        appends = tuple(
            msgspec.structs.replace(result_append(bus, message_id=f"r{rev}-{number}"), maxlen=100)
            for number in range(20)
        )
        commit(bus, step(bus, "o1", rev, rev + 1, appends=appends))
    assert 100 <= count(bus, bus.keys.results) <= 220  # `~` spares whole nodes


def test_full_server_still_takes_results_and_heartbeats(own_real_server: RealServer, namespace: str) -> None:
    bus = own_real_server.bus(namespace)
    begin(bus, "o1")
    commit(bus, step(bus, "o1", 0, 1))
    bus.client.config_set("maxmemory", 1)
    assert commit(bus, step(bus, "o1", 1, 2)) == (CommitAnswer.OK, "")
    renew(bus, NAME, "o1")
    assert count(bus, bus.keys.results) == 2
    assert retire(bus, NAME, "o1")


def test_scripts_survive_a_flush_of_the_scripts(bus: Bus, server: Server) -> None:
    begin(bus, "o1")
    server.client().script_flush()
    assert commit(bus, step(bus, "o1", 0, 1)) == (CommitAnswer.OK, "")
    renew(bus, NAME, "o1")


# -- stop --------------------------------------------------------------------------------------------------------


def test_retired_name_is_free_at_once_and_owes_nothing(bus: Bus) -> None:
    begin(bus, "o1")
    commit(bus, step(bus, "o1", 0, 1, clean=True))
    assert not retire(bus, NAME, "o2")
    assert retire(bus, NAME, "o1")
    assert Membership(bus).read() == ()
    found = begin(bus, "o2")
    assert (found.clean, found.known, found.created, found.position.cursor) == (True, False, False, "9-1")
    assert not retire(bus, NAME, "o1")


# -- clock -------------------------------------------------------------------------------------------------------


def test_time_is_the_servers_and_goes_on_without_this_machines_clock(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, _ = bus.client.time()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    if seconds:  # fakeredis takes its time from the clock that we have just stopped
        begin(bus, "o1")
    before = bus.now_ms()
    assert bus.clock.known
    assert bus.now_ms() >= before
    ahead = before + 86_400_000
    bus.clock.set(ahead, time.monotonic(), time.monotonic())
    assert 0 <= bus.now_ms() - ahead < 600_000


def test_offset_is_measured_against_the_middle_of_the_call(bus: Bus) -> None:
    bus.clock.set(1_000_000, 10.0, 12.0)
    sent = time.monotonic()
    assert bus.clock.now_ms() == pytest.approx(1_000_000 + (sent - 11.0) * 1000, abs=60_000)


# -- membership --------------------------------------------------------------------------------------------------


def test_membership_tells_who_is_registered_and_who_is_alive(bus: Bus) -> None:
    for rank in range(3):
        begin(bus, f"o{rank}", name=f"node-a/{rank}")
    bus.client.delete(bus.keys.live("node-a/1"))
    members = Membership(bus).read()
    assert [(member.name, member.alive) for member in members] == [
        ("node-a/0", True),
        ("node-a/1", False),
        ("node-a/2", True),
    ]
    assert {member.registration.chunk_size for member in members} == {256}


def test_issued_command_names_all_who_owe_a_result(bus: Bus) -> None:
    issuer = Issuer(bus)
    fields = encode_entry(Ping(), message_id="p1")
    assert issuer.issue(fields).members == ()
    begin(bus, "o0", name="node-a/0")
    begin(bus, "o1", name="node-a/1")
    for _ in range(2):  # before and after the issuer knows them
        issued = issuer.issue(fields)
        assert [(member.name, member.alive) for member in issued.members] == [("node-a/0", True), ("node-a/1", True)]
        assert bus.client.xrange(bus.keys.commands, issued.entry_id, issued.entry_id)[0][1] == fields
    bus.client.delete(bus.keys.live("node-a/1"))
    assert [member.alive for member in issuer.issue(fields).members] == [True, False]
    retire(bus, "node-a/0", "o0")
    assert [member.name for member in issuer.issue(fields).members] == ["node-a/1"]
    assert count(bus, bus.keys.commands) == 5


def test_registration_of_unknown_make_is_told_and_holds_nobody_up(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    bus.client.hset(bus.keys.workers, "node-a/9", b"\xff not json")
    assert [member.name for member in Membership(bus).read()] == ["node-a/9"]
    assert "node-a/9" in caplog.text


def test_only_the_forgotten_are_pruned(bus: Bus) -> None:
    for rank in range(3):
        begin(bus, f"o{rank}", name=f"node-a/{rank}")
    bus.client.delete(bus.keys.live("node-a/1"))  # dead, to be waited for
    bus.client.delete(bus.keys.live("node-a/2"), bus.keys.worker("node-a/2"))  # not renewed for a week
    assert prune(bus) == ["node-a/2"]
    assert [member.name for member in Membership(bus).read()] == ["node-a/0", "node-a/1"]


# -- publishers --------------------------------------------------------------------------------------------------


def test_publisher_epochs_rise_with_every_life(bus: Bus) -> None:
    info = PublisherRegistration(instance="node-a")
    first = register_publisher(bus, "node-a", info, least_epoch=1_000)
    second = register_publisher(bus, "node-a", info, least_epoch=0)
    third = register_publisher(bus, "node-a", info, least_epoch=5_000)
    assert (first, second, third) == (1_000, 1_001, 5_000)
    assert read_publishers(bus)["node-a"].epoch == registered_epoch(bus, "node-a") == 5_000
    assert registered_epoch(bus, "nobody") == 0


def test_publisher_name_has_one_living_holder(bus: Bus) -> None:
    info = PublisherRegistration(
        instance="node-a",
        epoch=register_publisher(bus, "node-a", PublisherRegistration(instance="node-a"), least_epoch=10),
        next_seq=3,
    )
    beat_publisher(bus, "node-a", "o1", info)
    with pytest.raises(Fenced, match="another living process"):
        beat_publisher(bus, "node-a", "o2", info)
    beat_publisher(bus, "node-a", "o1", info, last=True)
    beat_publisher(bus, "node-a", "o2", None)
    later = register_publisher(bus, "node-a", PublisherRegistration(instance="node-a"), least_epoch=0)
    assert later == 11
    bus.client.delete(bus.keys.live("node-a"))
    with pytest.raises(Fenced, match="epoch 11"):
        beat_publisher(bus, "node-a", "o1", info)
    assert read_publishers(bus)["node-a"].epoch == 11


# -- readers and counters ----------------------------------------------------------------------------------------


def test_reader_finds_its_place_again(bus: Bus) -> None:
    assert load_reader(bus, "memory") is None
    place = Position("5-1", "m5", 17)
    save_reader(bus, "memory", bus.keys.events, place, extra=bytes(range(256)))
    found = load_reader(bus, "memory")
    assert found is not None
    assert (found.position, found.stream, found.extra) == (place, bus.keys.events, bytes(range(256)))
    assert bus.client.pttl(bus.keys.reader("memory")) > 6 * 24 * 3600 * 1000
    save_reader(bus, "cli-1", bus.keys.events, Position())
    assert [reader.name for reader in list_readers(bus)] == ["cli-1", "memory"]
    assert forget_reader(bus, "cli-1")
    assert not forget_reader(bus, "cli-1")
    assert [reader.name for reader in list_readers(bus)] == ["memory"]


def test_readers_of_other_namespaces_are_not_listed(server: Server, namespace: str) -> None:
    ours, theirs = server.bus(namespace), server.bus(f"{namespace}x")
    save_reader(theirs, "memory", theirs.keys.events, Position())
    assert list_readers(ours) == []


def test_unreadable_place_is_refused_by_name(bus: Bus) -> None:
    bus.client.hset(bus.keys.reader("memory"), mapping={"cursor": "5-1", "entries": "many"})
    with pytest.raises(BusRefused, match="memory"):
        load_reader(bus, "memory")


def test_counters_lapse_when_they_are_not_renewed(bus: Bus) -> None:
    assert read_stats(bus, []) == {}
    write_stats(bus, NAME, {"commands": 3, "lag_s": 0.5})
    assert read_stats(bus, [NAME, "nobody/0"]) == {NAME: {"commands": 3, "lag_s": 0.5}}
    assert 0 < bus.client.pttl(bus.keys.stats(NAME)) <= 4 * bus.settings.stats_ms
