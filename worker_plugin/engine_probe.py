"""Is any of many chunks in a tier's index? Asked without making LMCache's key for each of them.

An agent's memory evicts all that it has seen, and most of it has left the tiers by itself long before. Making a key and
hashing it twice, in Python, was two thirds of such an evict's time, and it is the host's interpreter that it takes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cache
from itertools import repeat
from typing import Any

from kvbus.protocol.hashes import ChunkHash
from worker_plugin.lmcache_access import Key


def codes_of(key: Key, chunks: Sequence[ChunkHash]) -> list[int] | None:
    """What LMCache's keys of these chunks hash to. key: LMCache's own, of the first of them.

    None where this LMCache hashes its keys in another way than 0.4.3 and 0.4.4: then its keys have to be made.
    """
    try:
        before = (repeat(key.model_name), repeat(key.world_size), repeat(key.worker_id))
        behind = (repeat(key._dtype_str), repeat(key.tags))
    except AttributeError:
        return None
    codes = list(map(hash, zip(*before, chunks, *behind, strict=False)))
    return codes if codes[0] == hash(key) else None


def any_in(index: Container[Key], key: Key, codes: Sequence[int]) -> bool:
    """Whether the index may hold a key like this one with one of these codes. False is certain."""
    key_class: Any = type(key)
    probe = _probe_class(key_class)()
    for probe.code in codes:  # noqa: SIM110 - a generator for any() takes a third longer
        if probe in index:
            return True
    return False


@cache
def _probe_class(key_class: Any) -> Any:
    """A key that hashes to its code, and equals whatever has that hash: Python asks a subclass first."""

    class Probe(key_class):  # type: ignore[misc]  # LMCache's class is found when it is there
        __slots__ = ("code",)
        code: int

        def __init__(self) -> None:
            """Without the fields of a key: they are not looked at."""

        def __hash__(self) -> int:
            return self.code

        def __eq__(self, other: object) -> bool:
            return True

    return Probe
