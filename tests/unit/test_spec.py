"""The documents for machines: up to date, true to the types, and readable with other libraries than ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgpack
import pytest
from blake3 import blake3

from kvbus.ops import spec
from kvbus.ops.spec_samples import samples
from kvbus.protocol.codec import MESSAGES, decode_entry, from_plain, to_plain

DOCS = Path(__file__).parents[2] / "docs"
ASYNCAPI = json.loads((DOCS / spec.ASYNCAPI).read_text())
GOLDEN = json.loads((DOCS / spec.GOLDEN).read_text())
BY_NAME = {sample.name: sample for sample in samples()}


def test_the_documents_are_what_the_types_say() -> None:
    assert spec.drift(DOCS) == [], "run `kvbus spec write`"


def test_writing_is_repeatable_and_tells_what_changed(tmp_path: Path) -> None:
    (tmp_path / spec.PROTOCOL).write_text("# mine\n")
    assert {path.name for path in spec.write(tmp_path)} == {
        "asyncapi.json",
        "openapi.json",
        "golden.json",
        "protocol.md",
    }
    assert spec.write(tmp_path) == []
    assert (tmp_path / spec.PROTOCOL).read_text().startswith("# mine\n")
    (tmp_path / spec.GOLDEN).write_text("{}")
    assert [path.name for path in spec.drift(tmp_path)] == ["golden.json"]


def test_every_message_has_a_sample() -> None:
    assert {sample.message.TYPE for sample in samples()} == set(MESSAGES)


@pytest.mark.parametrize("name", BY_NAME)
def test_samples_fit_their_schemas(name: str) -> None:
    sample = BY_NAME[name]
    schema = {"$ref": f"#/components/schemas/{type(sample.message).__name__}", "components": ASYNCAPI["components"]}
    validator = jsonschema_rs.Draft202012Validator(schema)
    plain = to_plain(sample.message)
    validator.validate(plain)
    assert not validator.is_valid({**plain, next(iter(plain), "ttl_ms"): [[1]]})


def test_all_references_lead_somewhere() -> None:
    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                place: Any = ASYNCAPI
                for part in value["$ref"].removeprefix("#/").split("/"):
                    place = place[part]
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(ASYNCAPI)
    assert ASYNCAPI["asyncapi"] == "3.0.0"
    assert set(ASYNCAPI["components"]["messages"]) == set(MESSAGES)


@pytest.mark.parametrize("entry", GOLDEN["entries"], ids=lambda entry: entry["name"])
def test_golden_entries_are_the_same_message_in_both_forms(entry: dict[str, Any]) -> None:
    fields = {b"type": entry["type"].encode(), b"id": entry["id"].encode()}
    binary = decode_entry("1-0", fields | {b"body": bytes.fromhex(entry["body_hex"])}).message
    text = decode_entry("1-0", fields | {b"json": entry["json"].encode()}).message
    assert binary == text == BY_NAME[entry["name"]].message


@pytest.mark.parametrize("entry", GOLDEN["entries"], ids=lambda entry: entry["name"])
def test_golden_bodies_are_plain_msgpack(entry: dict[str, Any]) -> None:
    """Another library reads them, and what it writes is the same message."""
    body = bytes.fromhex(entry["body_hex"])
    value = msgpack.unpackb(body, raw=False, strict_map_key=True)
    assert isinstance(value, dict)
    again = decode_entry("1-0", {b"type": entry["type"].encode(), b"body": msgpack.packb(value)})
    assert again.message == BY_NAME[entry["name"]].message
    assert from_plain(entry["type"], json.loads(entry["json"])) == again.message


@pytest.mark.parametrize("item", GOLDEN["hashes"], ids=lambda item: item["text"])
def test_golden_hashes(item: dict[str, str]) -> None:
    value = msgpack.unpackb(bytes.fromhex(item["msgpack_hex"]))
    assert (value.hex() if isinstance(value, bytes) else f"{value:x}") == item["text"]
    assert re.fullmatch(r"0|-?[1-9a-f][0-9a-f]{0,15}|[0-9a-f]{64}", item["text"])


@pytest.mark.parametrize(
    "vector", GOLDEN["blake3"], ids=lambda vector: f"{len(vector['tokens'])}/{vector['chunk_size']}"
)
def test_golden_chains_from_the_rule_alone(vector: dict[str, Any]) -> None:
    previous, found = bytes(8), []
    size, tokens = vector["chunk_size"], vector["tokens"]
    for start in range(0, len(tokens) - size + 1, size):
        data = previous + b"".join(token.to_bytes(4, "big") for token in tokens[start : start + size])
        previous = blake3(data).digest()[:8]
        found.append(f"{int.from_bytes(previous, 'big', signed=True):x}")
    assert found == vector["hashes"]


def test_the_facade_is_in_the_openapi_document() -> None:
    paths = json.loads((DOCS / spec.OPENAPI).read_text())["paths"]
    assert {"/memory/prefetch", "/memory/evict", "/memory/sessions", "/memory/sessions/{session}/switch"} <= set(paths)
