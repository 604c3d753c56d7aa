"""Chunk hashes: strict text, exact values, and a chain that any language can follow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import InvalidMessage
from kvbus.protocol import blake3_chain, format_hash, hash_fingerprint, parse_hash
from kvbus.protocol.hashes import blake3_chunk, fingerprint_tokens, to_hash, to_hashes
from kvbus.protocol.limits import INT64_MIN, UINT64_MAX
from tests.unit.strategies import hashes

GOLDEN = json.loads((Path(__file__).parent / "golden" / "blake3.json").read_text())


@given(hashes)
def test_value_text_and_msgpack_round_trip_exactly(value: int | bytes) -> None:
    text = format_hash(value)
    assert parse_hash(text) == value
    assert type(parse_hash(text)) is type(value)
    assert parse_hash(text.upper()) == value
    assert to_hash(msgpack.unpackb(msgpack.packb(value, use_bin_type=True))) == value
    assert to_hashes([value, text]) == (value, value)


@given(st.integers(INT64_MIN, UINT64_MAX))
def test_text_is_what_the_engine_prints(value: int) -> None:
    assert format_hash(value) == f"{value:x}"
    assert re.fullmatch(r"0|-?[1-9a-f][0-9a-f]{0,15}", format_hash(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        ("-6ed9a448787a198f", -0x6ED9A448787A198F),
        ("-8000000000000000", INT64_MIN),
        ("7fffffffffffffff", 2**63 - 1),
        ("ffffffffffffffff", UINT64_MAX),
        ("3F5C45ECBAB5E9FD", 0x3F5C45ECBAB5E9FD),
        ("AB" * 32, b"\xab" * 32),
        ("00" * 32, bytes(32)),
    ],
)
def test_accepted_text(text: str, value: int | bytes) -> None:
    assert parse_hash(text) == value


REFUSED = {
    "empty": "",
    "minus alone": "-",
    "minus zero": "-0",
    "padding": "00ff",
    "padding after minus": "-0f",
    "zero twice": "00",
    "plus": "+1",
    "two minuses": "--1",
    "prefix": "0x1f",
    "underscore": "1_0",
    "newline after": "1f\n",
    "newline before": "\n1f",
    "blank after": "1f ",
    "blank before": " 1f",
    "tab": "\t1f",
    "NUL": "1f\x00",
    "full-width digits": "\uff11\uff12",
    "arabic digits": "\u0661\u0662",
    "letter that folds to ASCII": "\u212a1",
    "dotted capital I": "\u01301",
    "letter beyond f": "1g",
    "17 digits": "1" * 17,
    "below the smallest": "-8000000000000001",
    "far below": "-ffffffffffffffff",
    "63 digits": "a" * 63,
    "65 digits": "a" * 65,
    "digest with minus": "-" + "a" * 64,
    "digest with newline": "a" * 64 + "\n",
    "a million digits": "1" * 1_000_000,
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED.keys())
def test_refused_text_is_quoted_in_short(text: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        parse_hash(text)
    assert len(caught.value.message) < 200
    assert repr(text)[:20] in caught.value.message
    assert caught.value.hint


@given(st.text(max_size=70))
def test_grammar_is_exact(text: str) -> None:
    folded = text.lower() if text.isascii() else "no"
    whole = re.fullmatch(r"(0|-?[1-9a-f][0-9a-f]{0,15}|[0-9a-f]{64})", folded, re.ASCII)
    try:
        value = parse_hash(text)
    except InvalidMessage:
        assert whole is None or int(folded, 16) < INT64_MIN
    else:
        assert whole is not None
        assert format_hash(value) == folded


@pytest.mark.parametrize("item", [True, False, 1.0, None, [1], {"a": 1}, bytearray(32), b"", bytes(31), bytes(33)])
def test_other_types_are_refused(item: Any) -> None:
    with pytest.raises(InvalidMessage):
        to_hash(item)


def test_integers_outside_64_bits_are_refused() -> None:
    for item in (INT64_MIN - 1, UINT64_MAX + 1, 10**1_000):
        with pytest.raises(InvalidMessage, match="64 bits"):
            to_hash(item)
        with pytest.raises(InvalidMessage, match=r"\[1\]"):
            to_hashes([1, item])


def independent_chain(tokens: list[int], chunk_size: int) -> list[int]:
    """The definition in the documents, written again without a look at the product."""
    previous, chain = b"\0" * 8, []
    for start in range(0, len(tokens) - chunk_size + 1, chunk_size):
        raw = b"".join(token.to_bytes(4, "big") for token in tokens[start : start + chunk_size])
        previous = blake3(previous + raw).digest()[:8]
        chain.append(int.from_bytes(previous, "big", signed=True))
    return chain


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda vector: vector["name"])
def test_blake3_golden_vectors(vector: dict[str, Any]) -> None:
    chain = blake3_chain(vector["tokens"], vector["chunk_size"])
    assert [format_hash(value) for value in chain] == vector["hashes"]
    assert chain == independent_chain(vector["tokens"], vector["chunk_size"])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_blake3_chain_agrees_with_its_definition(tokens: list[int], chunk_size: int) -> None:
    chain = blake3_chain(tokens, chunk_size)
    assert chain == independent_chain(tokens, chunk_size)
    assert len(chain) == len(tokens) // chunk_size
    # The first chunks of a longer text have the hashes of the shorter one.
    assert blake3_chain(tokens + [1] * chunk_size, chunk_size)[: len(chain)] == chain


def test_blake3_partial_chunk_only_on_demand() -> None:
    assert len(blake3_chain([1, 2, 3], 2)) == 1
    assert len(blake3_chain([1, 2, 3], 2, keep_partial=True)) == 2
    assert blake3_chain([], 2, keep_partial=True) == []


def test_blake3_takes_digests_and_both_signs_before() -> None:
    assert blake3_chunk(-1, [1]) == blake3_chunk(UINT64_MAX, [1])  # the same eight bytes
    assert blake3_chunk(b"\0" * 8, [1]) == blake3_chunk(None, [1]) == blake3_chunk(0, [1])
    assert blake3_chunk(bytes(32), [1]) != blake3_chunk(None, [1])


def test_blake3_refuses_impossible_chunks() -> None:
    for size in (0, -1):
        with pytest.raises(InvalidMessage, match="chunk_size"):
            blake3_chain([1], size)


def test_fingerprints_differ_where_hashes_cannot_match() -> None:
    tokens = fingerprint_tokens(4)
    assert tokens == [1, 2, 3, 4]
    first = blake3_chain(tokens, 4)[0]
    own = hash_fingerprint("blake3", 4, first)
    assert own == hash_fingerprint("blake3", 4, first)
    assert own not in (hash_fingerprint("builtin", 4, first), hash_fingerprint("blake3", 8, first))
    assert own != hash_fingerprint("blake3", 4, first + 1)
