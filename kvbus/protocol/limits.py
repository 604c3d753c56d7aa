"""Every limit of the protocol, as a named constant. Checked before decoding wherever bytes can tell."""

from __future__ import annotations

from typing import Annotated

import msgspec

PROTOCOL_VERSION = "1"

MAX_BODY_BYTES = 1_572_864
"""1.5 MiB: the largest `body` or `json` field."""
MAX_HASHES = 65_536
"""Chunk hashes in one message."""
MAX_TEXT = 1_024
"""Characters of any one text field."""
MAX_CONTEXT_BYTES = 4_096
"""msgpack bytes of a request's context map."""
MAX_NESTING = 8
"""Maps and lists inside one another, the body itself counted."""
MAX_TAGS = 64
MAX_RESULT_HASHES = 1_024
"""Hashes that a result names for each outcome; counts are always exact."""
MAX_DEAD_BYTES = 65_536
"""Raw bytes of a refused entry that its dead letter keeps."""
MAX_RESULTS_PER_ENTRY = 4_096

INT64_MIN = -(2**63)
UINT64_MAX = 2**64 - 1
MAX_TTL_MS = 7 * 24 * 3600 * 1000

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Millis = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Ttl = Annotated[int, msgspec.Meta(ge=1, le=MAX_TTL_MS)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
