"""Chunk hashes on the scheduler's side: taken from the lookup that makes them anyway, never made twice.

LMCache's lookup clients (0.4.3: lookup_client.LMCacheLookupClient.lookup and its asynchronous, bypass and external
twins) hash a request's tokens by `self.token_database.process_tokens`. `HashTap` puts a delegating object into that
public attribute and listens while the connector is inside its own lookup call; LMCache's classes stay as they are.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvbus.protocol.hashes import ChunkHash, blake3_chunk, fingerprint_tokens, hash_fingerprint

Hashes = tuple[ChunkHash, ...]

MAX_WRAPPERS = 16
"""Lookup clients inside one another that are followed: a ring of wrappers must not hang the scheduler."""
UINT32_MAX = 2**32 - 1


class HashTap:
    """Remembers, request by request, the hashes of its latest lookup, until they are popped.

    Owned by the scheduler thread; only what `later` returns may be called elsewhere.
    """

    def __init__(self, *, use_blake3: bool = False) -> None:
        self.hashes: dict[str, Hashes] = {}
        self.request_id: str | None = None
        """Whose lookup is going on; None: nobody listens."""
        self._use_blake3 = use_blake3
        self._client: Any = None
        self._inner: Any = None
        self._database: Any = None

    def follow(self, client: Any) -> Any:
        """Listen to this lookup client; cheap where it is the same as before (LMCache can recreate its client).

        client: the outermost one, or None. Returns the innermost one. A client without a token_database makes no
        hashes to listen to.
        """
        if client is self._client:
            return self._inner
        self._client, self._database = client, None
        inner = self._inner = innermost(client)
        database = getattr(inner, "token_database", None)
        if database is None:
            return inner
        if isinstance(database, _Listened):
            database = database.kvbus_database
        if self._use_blake3:
            use_blake3(database)
        inner.token_database = _Listened(database, self)
        self._database = database
        return inner

    def pop(self, request_id: str) -> Hashes | None:
        """The request's hashes; empty if its text has no whole chunk; None if it was never looked up."""
        return self.hashes.pop(request_id, None)

    def fingerprint(self, chunk_size: int, configured: str) -> str:
        """This process's hash settings as one text, or "" where no client makes hashes.

        configured: LMCache's pre_caching_hash_algorithm.
        """
        if self._database is None:
            return ""
        found = self._database.process_tokens(fingerprint_tokens(chunk_size), make_key=False)
        return hash_fingerprint(algorithm(self._database, configured), chunk_size, _hash_of(next(iter(found))))

    def later(self, tokens: Sequence[int], prepare: Callable[[Sequence[int]], Any]) -> Callable[[], Hashes]:
        """A call that hashes the tokens with the same settings, for another thread to make.

        prepare: what the connector does to a request's tokens before it looks them up.
        """
        return functools.partial(_hash_all, self._database, tokens, prepare)

    def listen(self, request_id: str, found: Iterable[Any]) -> Iterator[Any]:
        """Pass the items on and keep their hashes once all have gone by."""
        hashes = []
        for item in found:
            hashes.append(_hash_of(item))
            yield item
        self.hashes[request_id] = tuple(hashes)


class _Listened:
    """A token database that behaves like the real one in all things, and lets a tap listen."""

    __slots__ = ("_tap", "kvbus_database")

    def __init__(self, database: Any, tap: HashTap) -> None:
        object.__setattr__(self, "kvbus_database", database)
        object.__setattr__(self, "_tap", tap)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kvbus_database, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.kvbus_database, name, value)

    def process_tokens(self, *args: Any, **kwargs: Any) -> Iterable[Any]:
        found: Iterable[Any] = self.kvbus_database.process_tokens(*args, **kwargs)
        request_id = self._tap.request_id
        return found if request_id is None else self._tap.listen(request_id, found)


def innermost(client: Any) -> Any:
    """The client at the end of a chain of wrappers (HitLimit, ChunkStatistics): the one that hashes and asks."""
    for _ in range(MAX_WRAPPERS):
        inner = getattr(client, "actual_lookup_client", None)
        if inner is None:
            break
        client = inner
    return client


def algorithm(database: Any, configured: str) -> str:
    """What really hashes: LMCache falls back to Python's hash() where vLLM's functions cannot be had."""
    name: str | None = getattr(database.hash_func, "kvbus_algorithm", None)
    return name or ("builtin" if database.hash_func is hash else configured)


def use_blake3(database: Any) -> None:
    """Make a token database hash with kvbus's own chain, which needs no PYTHONHASHSEED."""
    database.hash_func = _blake3_hash


def _blake3_hash(chunk: tuple[Any, ...]) -> int:
    """One chunk's hash. LMCache 0.4.3 calls this with (prefix, tokens, extra), LMCache-Ascend with (prefix, tokens)."""
    from lmcache.v1 import token_database

    prefix, tokens, *rest = chunk
    # Random in every process without a seed, and rolled anew by each further token database: read when needed.
    previous = None if prefix == token_database.NONE_HASH else prefix
    extra = rest[0] if rest else ()
    if extra:
        # LMCache 0.4.3 passes none. Whatever tells two texts apart must tell their hashes apart.
        tokens = (*tokens, *repr(extra).encode())
    try:
        return blake3_chunk(previous, tokens)
    except struct.error:  # a placeholder outside 0 to 2^32-1
        return blake3_chunk(previous, [int(token) & UINT32_MAX for token in tokens])


_blake3_hash.kvbus_algorithm = "blake3"  # type: ignore[attr-defined]


def _hash_of(item: Any) -> ChunkHash:
    # (start, end, hash), or a CacheEngineKey in its place where a client lets keys be made
    found = item[2]
    return getattr(found, "chunk_hash", found)  # type: ignore[no-any-return]


def _hash_all(database: Any, tokens: Sequence[int], prepare: Callable[[Sequence[int]], Any]) -> Hashes:
    if database is None:
        return ()
    return tuple(map(_hash_of, database.process_tokens(prepare(tokens), make_key=False)))
