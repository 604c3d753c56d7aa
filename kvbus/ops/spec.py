"""The protocol as documents that machines read: AsyncAPI 3, OpenAPI 3.1 and golden entries, made from the types.

They stand under docs/, and `drift` tells when they are no longer what the types say.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec

from kvbus import __version__
from kvbus.errors import MissingExtra
from kvbus.ops.spec_markdown import BEGIN, END, messages_section
from kvbus.ops.spec_samples import Sample, samples
from kvbus.protocol.codec import MESSAGES, encode_entry, encode_json_entry, to_plain
from kvbus.protocol.commands import COMMANDS
from kvbus.protocol.events import EVENTS
from kvbus.protocol.hashes import blake3_chain, format_hash, parse_hash
from kvbus.protocol.limits import MAX_BODY_BYTES, PROTOCOL_VERSION
from kvbus.settings import Settings
from kvbus.streams.keys import Keys

ASYNCAPI = "asyncapi.json"
OPENAPI = "openapi.json"
GOLDEN = "golden.json"
PROTOCOL = "protocol.md"
_REF = "#/components/schemas/{name}"

_STREAMS = {
    "commands": ("What a memory system asks of every worker.", tuple(cls.TYPE for cls in COMMANDS)),
    "events": ("Finished requests, and what workers tell of themselves.", tuple(cls.TYPE for cls in EVENTS)),
    "results": ("What workers answer to commands.", ("results",)),
    "dead": ("Entries that were refused, and why.", ("dead",)),
}
_OPERATIONS = (
    ("sendCommand", "send", "commands", "A memory system asks: XADD."),
    ("followEvents", "receive", "events", "A memory system learns what became of requests: XREAD from its own cursor."),
    ("followResults", "receive", "results", "A memory system learns what became of its commands: XREAD."),
    ("readDeadLetters", "receive", "dead", "An operator looks at what was refused: XREAD or XRANGE."),
)


def asyncapi() -> dict[str, Any]:
    """The streams, their messages, and the JSON Schema of every body."""
    _, schemas = msgspec.json.schema_components(tuple(MESSAGES.values()), ref_template=_REF)
    channels: dict[str, Any] = {}
    for stream, (about, types) in _STREAMS.items():
        channels[stream] = {
            "address": getattr(Keys("default"), stream).replace("{default}", "{slot}"),
            "description": f"{about} A Redis stream.",
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in types},
            "parameters": {"slot": {"$ref": "#/components/parameters/slot"}},
        }
    operations = {
        name: {
            "action": action,
            "channel": {"$ref": f"#/channels/{stream}"},
            "summary": about,
            "messages": [{"$ref": f"#/channels/{stream}/messages/{kind}"} for kind in _STREAMS[stream][1]],
        }
        for name, action, stream, about in _OPERATIONS
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "kvbus",
            "version": f"{PROTOCOL_VERSION}.0.0",
            "description": "Prefetch and evict KV chunks on every LMCache worker, and learn what requests leave. "
            "docs/protocol.md tells the rules; docs/golden.json has every message as bytes.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/msgpack",
        "servers": {
            "local": {"host": "127.0.0.1:6379", "protocol": "redis", "description": "Redis 7.0 or later, or Valkey."}
        },
        "channels": channels,
        "operations": operations,
        "components": {
            "parameters": {
                "slot": {
                    "description": "The namespace in braces, which belong to the key: one namespace, one cluster slot.",
                    "default": "{default}",
                    "examples": ["{default}", "{prod-eu.1}"],
                }
            },
            "messages": {name: _message(name) for name in MESSAGES},
            "schemas": schemas | {"Entry": _entry_schema()},
        },
    }


def _message(name: str) -> dict[str, Any]:
    cls = MESSAGES[name]
    examples = [
        {"name": sample.name, "headers": _headers(sample), "payload": to_plain(sample.message)}
        for sample in samples()
        if isinstance(sample.message, cls)
    ]
    return {
        "name": name,
        "title": cls.__name__,
        "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
        "contentType": "application/msgpack",
        "headers": {"$ref": "#/components/schemas/Entry"},
        "payload": {"$ref": f"#/components/schemas/{cls.__name__}"},
        "examples": examples,
    }


def _headers(sample: Sample) -> dict[str, str]:
    fields = encode_entry(sample.message, message_id=sample.message_id, origin=sample.origin)
    return {name.decode(): value.decode() for name, value in fields.items() if name != b"body"}


def _entry_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "title": "Entry",
        "description": "The fields of a stream entry beside the body, which is in the field `body` (a msgpack map) or, "
        "in its place, in the field `json` (the text of a JSON object).",
        "properties": {
            "v": {"const": PROTOCOL_VERSION, "description": "Version; absent means this one."},
            "type": {"enum": sorted(MESSAGES)},
            "id": {"type": "string", "maxLength": 1024, "description": "Unique; absent means the entry's own id."},
            "origin": {"type": "string", "maxLength": 1024, "description": "The message that this one repeats."},
        },
        "required": ["type"],
        "x-max-body-bytes": MAX_BODY_BYTES,
    }


def openapi() -> dict[str, Any]:
    """The facade's document, with its token asked for. Raises MissingExtra without the `rest` extra."""
    try:
        from kvbus.facade.app import create_app
    except ImportError as error:
        raise MissingExtra(f"the OpenAPI document needs the package {error.name}") from None
    found: dict[str, Any] = create_app(Settings(rest_token="token")).openapi()
    return found


def golden() -> dict[str, Any]:
    """Every message as bytes in both forms, hashes in theirs, and chains of the optional blake3 hashing."""
    return {
        "protocol": PROTOCOL_VERSION,
        "version": __version__,
        "entries": [_golden_entry(sample) for sample in samples()],
        "hashes": [_golden_hash(text) for text in _HASHES],
        "blake3": [_golden_chain(tokens, size) for tokens, size in _CHAINS],
    }


_HASHES = (
    *("0", "1", "7f", "80", "-1", "-20", "-21", "ff", "100", "7fffffffffffffff", "-8000000000000000"),
    *("8000000000000000", "ffffffffffffffff", "-6ed9a448787a198f", "3f5c45ecbab5e9fd"),
    "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
)
_CHAINS = (
    ([0], 1),
    ([4_294_967_295], 1),
    ([1, 2, 3, 4, 5], 2),
    (list(range(1, 17)), 16),
    ([7_919 * place % 50_257 for place in range(64)], 16),
)


def _golden_entry(sample: Sample) -> dict[str, Any]:
    binary = encode_entry(sample.message, message_id=sample.message_id, origin=sample.origin)
    text = encode_json_entry(sample.message, message_id=sample.message_id)
    return {
        "name": sample.name,
        "stream": sample.stream,
        "type": sample.message.TYPE,
        "id": sample.message_id,
        **({"origin": sample.origin} if sample.origin else {}),
        "body_hex": binary[b"body"].hex(),
        "json": text[b"json"].decode(),
    }


def _golden_hash(text: str) -> dict[str, str]:
    return {"text": text, "msgpack_hex": msgspec.msgpack.encode(parse_hash(text)).hex()}


def _golden_chain(tokens: list[int], chunk_size: int) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "chunk_size": chunk_size,
        "hashes": [format_hash(item) for item in blake3_chain(tokens, chunk_size)],
    }


def protocol_text(text: str) -> str:
    """docs/protocol.md with its generated part as it should be."""
    if BEGIN not in text:
        text += f"\n{BEGIN}\n{END}\n"
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{messages_section(_STREAMS)}\n{END}{tail}"


def documents(directory: Path) -> dict[Path, str]:
    """Path to content of everything that is generated. Raises MissingExtra."""
    protocol = directory / PROTOCOL
    found = {
        directory / name: json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        for name, content in ((ASYNCAPI, asyncapi()), (OPENAPI, openapi()), (GOLDEN, golden()))
    }
    if protocol.exists():
        found[protocol] = protocol_text(protocol.read_text(encoding="utf-8"))
    return found


def write(directory: Path) -> list[Path]:
    """Write what has changed; returns those files. Raises MissingExtra."""
    changed = drift(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in documents(directory).items():
        if path in changed:
            path.write_text(text, encoding="utf-8")
    return changed


def drift(directory: Path) -> list[Path]:
    """The files that are not what the types say. Raises MissingExtra."""
    return [
        path
        for path, text in documents(directory).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
