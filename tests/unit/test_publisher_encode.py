"""A finished request becomes an entry that every reader takes, or is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import ProtocolError
from kvbus.protocol import RequestFinished, decode_entry
from publisher import FinishedRequest
from publisher.encode import Record, encode, with_epoch


def made(hashes: Any = (), **values: Any) -> tuple[RequestFinished, tuple[str, ...], Record]:
    finished = FinishedRequest(**{"request_id": "r", "instance": "i", "reason": "stop", **values})
    record, mended = encode(finished, hashes, publisher="p", epoch=7, seq=3, finished_at_ms=99)
    message = decode_entry("1-1", record.fields("p")).message
    assert isinstance(message, RequestFinished)
    return message, mended, record


def test_everything_arrives() -> None:
    values: dict[str, Any] = {
        "request_id": "r-1",
        "external_id": "r",
        "model": "m",
        "reason": "length",
        "chunk_size": 256,
        "prompt_tokens": 512,
        "output_tokens": 9,
        "cached_tokens": 256,
        "hash_fingerprint": "builtin/256/1f",
        "tags": (("a", "1"), ("b", "2")),
        "context": {"session": "s", "n": [1, 2.5, None]},
    }
    hashes = (1, -(2**63), 2**63 - 1, bytes(32), 2**64 - 1)
    message, mended, _ = made(hashes, **values)
    assert mended == ()
    assert message.chunk_hashes == hashes
    for name, value in values.items():
        assert getattr(message, name) == value, name
    assert (message.publisher, message.epoch, message.seq, message.finished_at_ms) == ("p", 7, 3, 99)


def test_a_resend_carries_the_same_message_id_and_no_other_event_does() -> None:
    ids = {Record(e, s, b"").fields(p)[b"id"] for e in (1, 2) for s in (0, 1) for p in ("p", "q")}
    assert len(ids) == 8
    assert all(len(text) == 32 for text in ids)
    assert Record(1, 0, b"a").fields("p")[b"id"] == Record(1, 0, b"b").fields("p")[b"id"]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"context": {"a": "x" * 5000}}, ("context",)),
        ({"context": {"a": object()}}, ("context",)),
        ({"context": {1: "not text"}}, ("context",)),
        ({"context": {"n": float("nan")}}, ("context",)),
        ({"context": {"n": 2**70}}, ("context",)),
        ({"external_id": "x" * 2000}, ("external_id",)),
        ({"external_id": "half \ud800"}, ("external_id",)),
        ({"reason": "because"}, ("reason",)),
        ({"output_tokens": -1}, ("output_tokens",)),
        ({"chunk_size": 2**60}, ("chunk_size",)),
        ({"model": "m" * 3000}, ("model",)),
        ({"request_id": "x" * 2000, "external_id": "x" * 1999}, ("request_id", "external_id")),
    ],
)
def test_what_can_be_spared_is_spared_so_that_the_hashes_arrive(values: dict[str, Any], names: tuple[str, ...]) -> None:
    message, mended, _ = made((1, 2, 3), **values)
    assert set(mended) == set(names)
    assert message.chunk_hashes == (1, 2, 3)


def test_long_request_ids_stay_apart() -> None:
    ids = {made((), request_id="x" * 2000 + tail)[0].request_id for tail in "ab"}
    assert len(ids) == 2


@pytest.mark.parametrize(("hash_", "most"), [(1, 65_536), (bytes(32), 40_000)])
def test_a_chain_that_is_too_long_keeps_its_beginning(hash_: Any, most: int) -> None:
    message, mended, _ = made([hash_] * 70_000)
    assert mended == ("chunk_hashes",)
    assert len(message.chunk_hashes) == most


@pytest.mark.parametrize(
    ("hashes", "values"),
    [
        ((1, 2**64), {}),
        ((1, "zz"), {}),
        ((1, b"short"), {}),
        ((1, None), {}),
        ((1,), {"tags": (("a", "x" * 2000),)}),
        ((1,), {"tags": (("a", "b"),) * 100}),
    ],
)
def test_what_would_name_other_chunks_is_refused(hashes: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        made(hashes, **values)


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=1200),
    st.none() | st.text(max_size=1200),
    st.text(max_size=20),
    st.integers(),
    st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.floats() | st.text(max_size=2000), max_size=4),
    st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=32, max_size=32), max_size=40),
)
def test_whatever_the_fields_hold_readers_can_take_the_event(
    request_id: str, external: str | None, reason: str, tokens: int, context: dict[str, Any], hashes: list[Any]
) -> None:
    message, _, _ = made(
        hashes, request_id=request_id, external_id=external, reason=reason, prompt_tokens=tokens, context=context
    )
    assert message.chunk_hashes == tuple(hashes)


def test_with_epoch() -> None:
    message, _, record = made((5,), context={"a": 1})
    moved = with_epoch(record, 8)
    again = decode_entry("1-1", moved.fields("p")).message
    assert isinstance(again, RequestFinished)
    assert (again.epoch, moved.epoch, again.seq) == (8, 8, 3)
    assert again.context == message.context
