"""Stands in for the Rust example's codec where its crates cannot be had: python twin.py ../../docs/golden.json

Reads the structs from src/messages.rs, writes commands as `rmp_serde::to_vec_named` does (a map of the struct's fields
in their order, without those that are None; integers in their shortest form), and compares with the golden bytes.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgpack

SOURCE = Path(__file__).parent / "src" / "messages.rs"
_FIELD = re.compile(r"^\s+pub (\w+): (.+),$")


class Field:
    """A struct's field. optional: it may be absent."""

    def __init__(self, name: str, kind: str, attribute: str) -> None:
        self.name, self.kind = name, kind
        self.optional = "default" in attribute or kind.startswith("Option<")
        self.skipped_when_none = "Option::is_none" in attribute


def structs(source: str) -> dict[str, list[Field]]:
    """Every struct's fields in their order."""
    found: dict[str, list[Field]] = {}
    fields: list[Field] | None = None
    attribute = ""
    for line in source.splitlines():
        begin = re.match(r"^pub struct (\w+) \{$", line)
        if begin:
            fields = found[begin[1]] = []
        elif line == "}":
            fields = None
        elif fields is not None:
            field = _FIELD.match(line)
            if field:
                fields.append(Field(field[1], field[2], attribute))
                attribute = ""
            elif line.strip().startswith("#["):
                attribute = line
    return found


def to_vec_named(fields: list[Field], values: dict[str, Any]) -> bytes:
    """The struct as rmp-serde writes it."""
    unknown = values.keys() - {field.name for field in fields}
    assert not unknown, f"the Rust struct has no {unknown}"
    written = {
        field.name: values.get(field.name)
        for field in fields
        if not (field.skipped_when_none and values.get(field.name) is None)
    }
    return bytes(msgpack.packb(written, use_bin_type=True))


def hash_value(text: str) -> int | bytes:
    return bytes.fromhex(text) if len(text) == 64 else int(text, 16)


def check(golden: dict[str, Any]) -> int:
    """How many golden entries were compared. Raises AssertionError."""
    known = structs(SOURCE.read_text())
    checked = 0
    for entry in golden["entries"]:
        body, plain = bytes.fromhex(entry["body_hex"]), json.loads(entry["json"])
        if entry["type"] in ("prefetch", "evict") and not {"tags", "target"} & plain.keys():
            values = {**plain, "chunk_hashes": [hash_value(text) for text in plain["chunk_hashes"]]}
            assert to_vec_named(known["Command"], values) == body, entry["name"]
            checked += 1
        elif entry["type"] == "request.finished":
            needs(known["RequestFinished"], msgpack.unpackb(body), entry["name"])
            checked += 1
        elif entry["type"] == "results":
            value = msgpack.unpackb(body)
            needs(known["Results"], value, entry["name"])
            for result in value["results"]:
                needs(known["CommandResult"], result, entry["name"])
            checked += 1
    return checked


def needs(fields: list[Field], value: dict[str, Any], name: str) -> None:
    """All that the struct must have is there, and of the kind that it names."""
    kinds = {"String": str, "u64": int, "Vec": list, "BTreeMap": dict}
    for field in fields:
        assert field.optional or field.name in value, f"{name}: {field.name} is not there"
        if field.name in value:
            wanted = kinds[field.kind.partition("<")[0]]
            assert isinstance(value[field.name], wanted), f"{name}: {field.name} is no {field.kind}"


if __name__ == "__main__":
    print(f"{check(json.loads(Path(sys.argv[1]).read_text()))} golden entries agree")
