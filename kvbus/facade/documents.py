"""The OpenAPI document: the bodies' schemas come from the types that are really written and read."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvbus.facade import memory_models, models
from kvbus.facade.bodies import MAX_BODY
from kvbus.protocol.commands import EVICT_TTL_MS, KNOWN_TIERS, LOOKUP_TTL_MS, PREFETCH_TTL_MS, Target
from kvbus.protocol.limits import MAX_TAGS, MAX_TEXT, MAX_TTL_MS

_REF = "#/components/schemas/{name}"
_BODIES = (
    models.PrefetchReply,
    models.EvictReply,
    models.LookupReply,
    models.CommandReply,
    models.ErrorReply,
    models.FailuresReply,
    models.WorkersReply,
    models.HealthReply,
    models.ReadyReply,
    Target,
    *memory_models.BODIES,
)
Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "Refused; `error` names the offender. Nothing was put on the bus.",
    401: "The bearer token is missing or wrong.",
    403: "Asked by a page of another site.",
    404: "Not known.",
    413: f"The body is larger than {MAX_BODY:,} bytes.",
    503: "No worker is alive, or the server of the bus is away. Try again.",
}


def answers(model: type[msgspec.Struct], description: str, *errors: int) -> Responses:
    """A route's responses: its success, and the errors that it may end with."""
    found = {200: _json(model, description)}
    for status in errors:
        found[status] = (
            _json(models.FailuresReply, "A worker failed, or did not answer in time.")
            if status == 500
            else _json(models.ErrorReply, _ERRORS[status])
        )
    return found  # type: ignore[return-value]


def command_body(kind: str) -> dict[str, Any]:
    """The request body of a command, for `openapi_extra`."""
    ttl = {"prefetch": PREFETCH_TTL_MS, "evict": EVICT_TTL_MS, "lookup": LOOKUP_TTL_MS}[kind]
    tiers = {"type": "array", "items": {"enum": list(KNOWN_TIERS)}, "minItems": 1, "maxItems": 8}
    text = {"type": "string", "maxLength": MAX_TEXT}
    properties: dict[str, Any] = {
        "chunk_hashes": models.CHUNK_HASHES,
        "lookup_id": {**models.LOOKUP_ID, "minLength": 1 if kind == "prefetch" else 0},
        "tags": {
            "type": "array",
            "maxItems": MAX_TAGS,
            "items": {"type": "array", "prefixItems": [text, text], "minItems": 2, "maxItems": 2, "items": text},
            "description": "Ordered (name, value) pairs that the chunks were stored with.",
        },
        "target": {"$ref": _REF.format(name="Target")},
        "ttl_ms": {"type": "integer", "minimum": 1, "maximum": MAX_TTL_MS, "default": ttl},
    }
    if kind == "prefetch":
        properties["sources"] = {**tiers, "description": "Tiers to read from; all that can be read if left out."}
    if kind == "evict":
        properties["locations"] = {**tiers, "description": "Tiers to remove from; all if left out."}
    required = ["chunk_hashes", "lookup_id"] if kind == "prefetch" else ["chunk_hashes"]
    for name in properties.keys() - set(required):
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    schema = {"type": "object", "properties": properties, "required": required}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI, *, secured: bool) -> dict[str, Any]:
    """The whole document. secured: a token is asked for."""
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template=_REF)
    components = found.setdefault("components", {})
    components["schemas"] = schemas
    for path in found["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # what does not validate is a 400 here, like all that is refused
            if secured and operation.pop("x-open", None) is None:
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = _json(models.ErrorReply, _ERRORS[401])
            operation.pop("x-open", None)
    if secured:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return found


def _json(model: type[msgspec.Struct], description: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=model.__name__)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
