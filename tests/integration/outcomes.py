"""Counting what became of chunks; apart from engines.py because this needs no LMCache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from worker_plugin.engine_types import ChunkOutcome


def count(outcomes: Sequence[ChunkOutcome]) -> dict[str, int]:
    """How many chunks ended how, by the outcome's name."""
    return dict(Counter(str(outcome.outcome) for outcome in outcomes))
