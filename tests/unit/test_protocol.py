"""The wire: what goes in comes out, in both forms; and whatever comes in, only ProtocolError comes out."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvbus.errors import InvalidMessage, OverLimit, ProtocolError, UndecodableEntry, UnknownType
from kvbus.protocol import (
    Evict,
    Held,
    Message,
    Ping,
    Prefetch,
    RequestFinished,
    Target,
    decode_entry,
    encode_entry,
    encode_json_entry,
    new_message_id,
    to_plain,
)
from kvbus.protocol.codec import COMMAND_TYPES, EVENT_TYPES, MESSAGES, from_plain, parse_json_object
from kvbus.protocol.dead import cut_fields
from kvbus.protocol.events import check_context
from kvbus.protocol.limits import (
    MAX_BODY_BYTES,
    MAX_CONTEXT_BYTES,
    MAX_DEAD_BYTES,
    MAX_HASHES,
    MAX_NESTING,
    MAX_TEXT,
)
from tests.unit.strategies import messages

TYPES = st.sampled_from(sorted(MESSAGES))
MANY = settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])


def entry(type_name: str, **fields: bytes) -> dict[bytes, bytes]:
    return {b"v": b"1", b"type": type_name.encode(), **{name.encode(): value for name, value in fields.items()}}


def finished(**values: Any) -> RequestFinished:
    fixed = {"request_id": "r", "instance": "i", "reason": "stop", "publisher": "p", "epoch": 1, "seq": 1}
    return RequestFinished(**{**fixed, "finished_at_ms": 1, **values})


@MANY
@given(messages)
def test_round_trip_in_both_forms(message: Message) -> None:
    binary = decode_entry("5-1", encode_entry(message, message_id="m", origin="o"))
    assert (binary.message, binary.entry_id, binary.id, binary.origin) == (message, "5-1", "m", "o")
    assert binary.type == message.TYPE
    for_people = decode_entry(b"5-1", encode_json_entry(message))
    assert (for_people.message, for_people.id, for_people.origin) == (message, "5-1", None)


@MANY
@given(messages)
def test_another_msgpack_library_reads_what_we_write(message: Message) -> None:
    body = encode_entry(message, message_id="m")[b"body"]
    seen = msgpack.unpackb(body, raw=False, strict_map_key=False)
    assert seen == json_like(msgspec.to_builtins(message, builtin_types=(bytes,)))


def json_like(value: Any) -> Any:
    """Tuples as lists, all the way down: what any other library makes of an array."""
    if isinstance(value, dict):
        return {key: json_like(item) for key, item in value.items()}
    return [json_like(item) for item in value] if isinstance(value, list | tuple) else value


@MANY
@given(messages)
def test_we_read_what_another_msgpack_library_writes_with_text_hashes(message: Message) -> None:
    plain = to_plain(message)
    assert from_plain(message.TYPE, json.loads(json.dumps(plain))) == message
    if message.TYPE in COMMAND_TYPES | EVENT_TYPES:  # the others hold bytes, which are not text in msgpack
        body = msgpack.packb(plain, use_bin_type=True)
        assert decode_entry("1-0", entry(message.TYPE, body=body)).message == message


@MANY
@given(messages, st.data())
def test_truncated_and_mutated_bytes_raise_only_protocol_errors(message: Message, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["body", "json"]))
    whole = encode_entry(message, message_id="m") if form == "body" else encode_json_entry(message)
    raw = bytearray(whole[form.encode()])
    for _ in range(data.draw(st.integers(0, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    _decodes_or_refuses(entry(message.TYPE, **{form: cut}))


@MANY
@given(TYPES, st.sampled_from(["body", "json"]), st.binary(max_size=200))
def test_any_bytes_raise_only_protocol_errors(type_name: str, form: str, raw: bytes) -> None:
    _decodes_or_refuses(entry(type_name, **{form: raw}))


@MANY
@given(
    st.dictionaries(st.sampled_from([b"v", b"type", b"id", b"body", b"json", b"origin", b"x"]), st.binary(max_size=40))
)
def test_any_fields_raise_only_protocol_errors(fields: dict[bytes, bytes]) -> None:
    _decodes_or_refuses(fields)


def _decodes_or_refuses(fields: dict[bytes, bytes]) -> None:
    try:
        envelope = decode_entry("1-0", fields)
    except ProtocolError as error:
        refusal = error
    else:
        # What was taken can be written again: a reader may quote it in an answer or a dead letter.
        encode_entry(envelope.message, message_id=envelope.id)
        encode_json_entry(envelope.message)
        return
    assert len(refusal.message) < 4_000
    assert refusal.code in ("undecodable", "invalid", "over_limit", "unknown_type")


HOSTILE_BODIES = {
    "endless list": b"\x81\xacchunk_hashes\xdd\xff\xff\xff\xff",
    "endless list under an unknown key": b"\x81\xa1z\xdd\xff\xff\xff\xff",
    "endless map in context": b"\x81\xa7context\xdf\xff\xff\xff\xff",
    "endless text": b"\x81\xa6issuer\xdb\xff\xff\xff\xff",
    "lists inside lists": b"\x81\xa1z" + b"\x91" * 1_000_000 + b"\x01",
    "maps inside maps": b"\x81\xa1z" + b"\x81\xa1a" * 300_000 + b"\x01",
    "lists of lists that claim to be long": b"\x81\xa1z" + b"\xdd\x0f\xff\xff\xff" * 1_000,
    "two bodies": b"\x80\x80",
    "nothing": b"",
    "not a map": b"\x93\x01\x02\x03",
    "a reserved byte": b"\xc1",
}


@pytest.mark.parametrize("type_name", sorted(MESSAGES))
@pytest.mark.parametrize("body", HOSTILE_BODIES.values(), ids=HOSTILE_BODIES.keys())
def test_hostile_body_is_refused(type_name: str, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_entry("1-0", entry(type_name, body=body))


HOSTILE_JSON = {
    "arrays inside arrays": (b"[" * 1_000_000, UndecodableEntry),
    "objects inside objects": (b'{"a":' * 300_000, UndecodableEntry),
    "nine levels": (b'{"z":' + b"[" * MAX_NESTING + b"]" * MAX_NESTING + b"}", OverLimit),
    "integer of 100,000 digits": (b'{"ttl_ms":' + b"9" * 100_000 + b"}", UndecodableEntry),
    "integer of 100 digits": (b'{"ttl_ms":' + b"9" * 100 + b"}", InvalidMessage),
    "NaN": (b'{"ttl_ms":NaN}', InvalidMessage),
    "Infinity": (b'{"ttl_ms":-Infinity}', InvalidMessage),
    "number beyond a double": (b'{"ttl_ms":1e999}', InvalidMessage),
    "fraction for an integer": (b'{"ttl_ms":5.5}', InvalidMessage),
    "true for an integer": (b'{"ttl_ms":true}', InvalidMessage),
    "duplicate key": (b'{"issuer":"a","issuer":"b"}', InvalidMessage),
    "duplicate key deep down": (b'{"z":[{"a":1,"a":1}]}', InvalidMessage),
    "half a surrogate pair": (b'{"issuer":"\\ud800"}', UndecodableEntry),
    "half a pair as a key": (b'{"\\uDFFF":1}', UndecodableEntry),
    "byte order mark": (b"\xef\xbb\xbf{}", UndecodableEntry),
    "not UTF-8": (b'{"issuer":"\xff"}', UndecodableEntry),
    "two objects": (b"{}{}", UndecodableEntry),
    "an array": (b"[]", UndecodableEntry),
    "a text": (b'"ping"', UndecodableEntry),
    "null": (b"null", UndecodableEntry),
    "nothing": (b"", UndecodableEntry),
    "single quotes": (b"{'issuer':'a'}", UndecodableEntry),
}


@pytest.mark.parametrize(("text", "kind"), HOSTILE_JSON.values(), ids=HOSTILE_JSON.keys())
def test_hostile_json_is_refused(text: bytes, kind: type[ProtocolError]) -> None:
    with pytest.raises(kind):
        decode_entry("1-0", entry("ping", json=text))


def test_whole_surrogate_pair_is_a_character() -> None:
    message = decode_entry("1-0", entry("ping", json=b'{"issuer":"\\ud83d\\ude00"}')).message
    assert message == Ping(issuer="\N{GRINNING FACE}")


def test_hand_written_entry_needs_no_version_and_no_id() -> None:
    envelope = decode_entry("7-3", {b"type": b"evict", b"json": b'{"chunk_hashes":["3F5C45ECBAB5E9FD"]}'})
    assert envelope.id == envelope.entry_id == "7-3"
    assert envelope.message == Evict(chunk_hashes=(0x3F5C45ECBAB5E9FD,))


def test_unknown_keys_and_fields_are_ignored() -> None:
    fields = entry("ping", json=b'{"ttl_ms":5,"from_the_future":{"a":[1]}}', extra=b"x")
    assert decode_entry("1-0", fields).message == Ping(ttl_ms=5)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({b"json": b"{}"}, UndecodableEntry),
        ({b"type": b"ping"}, UndecodableEntry),
        ({b"type": b"ping", b"json": b"{}", b"body": b"\x80"}, UndecodableEntry),
        ({b"type": b"pong", b"json": b"{}"}, UnknownType),
        ({b"type": b"", b"json": b"{}"}, UnknownType),
        ({b"type": b"\xff" * 500, b"json": b"{}"}, UnknownType),
        ({b"v": b"2", b"type": b"ping", b"json": b"{}"}, UnknownType),
        ({b"type": b"ping", b"json": b"{}", b"id": b"\xff"}, UndecodableEntry),
        ({b"type": b"ping", b"json": b"{}", b"id": b"x" * (MAX_TEXT + 1)}, OverLimit),
    ],
)
def test_envelope_is_strict(fields: dict[bytes, bytes], kind: type[ProtocolError]) -> None:
    with pytest.raises(kind):
        decode_entry("1-0", fields)


@pytest.mark.parametrize("form", ["body", "json"])
def test_size_is_checked_before_decoding(form: str) -> None:
    # Not one byte of it is a message: a decoder that looked at it would have said so.
    with pytest.raises(OverLimit, match=f"`{form}` has 1,572,865 bytes; the limit is 1,572,864"):
        decode_entry("1-0", entry("ping", **{form: b"\xc1" * (MAX_BODY_BYTES + 1)}))


def test_too_many_hashes_are_over_the_limit_wherever_they_come_from() -> None:
    with pytest.raises(OverLimit, match="65,537"):
        Evict(chunk_hashes=(1,) * (MAX_HASHES + 1))
    for form, raw in (
        ("body", msgpack.packb({"chunk_hashes": [1] * (MAX_HASHES + 1)})),
        ("json", json.dumps({"chunk_hashes": ["1"] * (MAX_HASHES + 1)}).encode()),
    ):
        with pytest.raises(OverLimit):
            decode_entry("1-0", entry("evict", **{form: raw}))


def test_the_largest_message_passes() -> None:
    message = Prefetch(chunk_hashes=tuple(range(-(2**63), -(2**63) + MAX_HASHES)))
    assert decode_entry("1-0", encode_entry(message, message_id="m")).message == message


@pytest.mark.parametrize(
    "message",
    [
        Ping(issuer="x" * (MAX_TEXT + 1)),
        Ping(issuer="\ud800"),
        Ping(ttl_ms=0),
        Ping(ttl_ms=2**70),
        Ping(target=Target(ranks=(-1,))),
        Evict(chunk_hashes=(1,), locations=()),
        Evict(chunk_hashes=tuple(range(MAX_HASHES)), tags=(("x" * 1_024, "y" * 1_024),) * 64 * 8),
    ],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("encode", [encode_entry, encode_json_entry])
def test_nothing_is_written_that_readers_must_refuse(encode: Any, message: Message) -> None:
    with pytest.raises(ProtocolError):
        encode(message, message_id="m")


@pytest.mark.parametrize("hashes", [[], "3f", b"3f", [True], [1.0], [None], [2**64], [-(2**63) - 1], [b"short"]])
def test_commands_refuse_what_is_not_a_list_of_hashes(hashes: Any) -> None:
    with pytest.raises(InvalidMessage):
        Prefetch(chunk_hashes=hashes)


def test_refused_hash_is_named_by_its_place() -> None:
    with pytest.raises(InvalidMessage, match=r"chunk_hashes\[1\]: '0x12' is not a chunk hash"):
        Prefetch(chunk_hashes=("12", "0x12"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("context", "kind"),
    [
        ({"a": float("nan")}, InvalidMessage),
        ({"a": [float("inf")]}, InvalidMessage),
        ({"a": b"bytes"}, InvalidMessage),
        ({1: "a"}, InvalidMessage),
        ({"a": {2: "a"}}, InvalidMessage),
        ({"a": 2**64}, InvalidMessage),
        ({"a": {"b": {"c": {"d": {"e": {"f": {"g": {}}}}}}}}, OverLimit),
        ({"a": "x" * MAX_CONTEXT_BYTES}, OverLimit),
        ({"a": "\ud800"}, InvalidMessage),
    ],
)
def test_context_is_plain_data_within_limits(context: dict[str, Any], kind: type[ProtocolError]) -> None:
    with pytest.raises(kind):
        check_context(context)
    with pytest.raises(kind):
        finished(context=context)


@given(st.recursive(st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5))
@example([])
def test_parse_json_object_takes_objects_only(value: Any) -> None:
    text = json.dumps(value)
    try:
        assert parse_json_object(text) == value
        assert isinstance(value, dict)
    except ProtocolError:
        assert not isinstance(value, dict) or "[[[[" in text or text.count("[") + text.count("{") > MAX_NESTING


@given(st.dictionaries(st.binary(max_size=100), st.binary(max_size=50_000), max_size=5))
def test_dead_letters_keep_at_most_64_kib(fields: dict[bytes, bytes]) -> None:
    kept, size = cut_fields(fields)
    assert size == sum(len(name) + len(value) for name, value in fields.items())
    assert sum(len(name) + len(value) for name, value in kept.items()) <= MAX_DEAD_BYTES


def test_held_names_the_tiers_of_a_place() -> None:
    held = Held(tiers=("DDR", "SSD"), masks=bytes([0, 1, 2, 3]))
    assert [held.tiers_of(place) for place in range(5)] == [(), ("DDR",), ("SSD",), ("DDR", "SSD"), ()]


def test_target_is_met_by_all_that_it_names() -> None:
    target = Target(instances=("a",), ranks=(0, 1))
    assert target.matches(model="m", instance="a", rank=1)
    assert not target.matches(model="m", instance="a", rank=2)
    assert not target.matches(model="m", instance="b", rank=0)
    assert Target().matches(model="m", instance="b", rank=0)
    assert not Target(models=()).matches(model="m", instance="b", rank=0)


def test_message_ids_are_unique() -> None:
    ids = {new_message_id() for _ in range(1_000)}
    assert len(ids) == 1_000
    assert {len(one) for one in ids} == {32}
