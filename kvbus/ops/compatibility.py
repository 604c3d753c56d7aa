"""Which LMCache and vLLM this release was tried with. docs/compatibility.md says how."""

from __future__ import annotations

import re

LMCACHE = ("0.4.3", "0.4.4")
VLLM = ("0.18.0",)
"""Each stands for its patch releases, too."""


def fits(version: str, tried: tuple[str, ...]) -> bool:
    """Whether a version (local parts and pre-release marks aside) is one of those tried, or a patch release of one."""
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        return False
    parts = found[0].split(".")
    return any(parts[: len(known.split("."))] == known.split(".") for known in tried)
