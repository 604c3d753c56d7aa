"""Clients for one namespace: how to reach the server, how long to wait, and what its errors mean."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvbus.errors import BusError, BusFull, BusRefused, BusUnavailable, ConfigError
from kvbus.settings import Settings, redact_url
from kvbus.streams.keys import Keys
from kvbus.streams.line import Line, Packed, can_hold

Client = Any
"""redis.Redis or redis.RedisCluster: the two share no base class. Replies are bytes, RESP2."""

Argument = str | bytes | int

_UNAVAILABLE = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.BusyLoadingError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.AskError,
    redis.exceptions.MovedError,
    redis.exceptions.RedisClusterException,
    OSError,
)
# These arrive as plain ResponseError, and pass by themselves.
_PASSING = ("UNBLOCKED", "NOREPLICAS", "MASTERDOWN", "LOADING", "CLUSTERDOWN", "TRYAGAIN", "BUSY ")


class bus_errors:
    """Turn whatever redis-py raises into a BusError that says what failed.

    A class of its own: a generator's context manager would be a tenth of what a worker's two calls cost.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            found = _bus_error(self._what, error)
            if found is not None:
                raise found from error


def _bus_error(what: str, error: BaseException) -> BusError | None:
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return BusRefused(f"{what}: {error}", hint="Check the user, its password and its ACL on the server.")
    if isinstance(error, _UNAVAILABLE):
        return BusUnavailable(f"{what}: {type(error).__name__}: {error}")
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return BusFull(f"{what}: {error}")
    if not isinstance(error, redis.RedisError):
        return None
    text = str(error)
    if text.startswith(_PASSING):
        return BusUnavailable(f"{what}: {text}")
    if text.startswith("OOM") or "OOM command not allowed" in text:
        return BusFull(f"{what}: {text}")
    return BusRefused(f"{what}: {text}")


def connect(settings: Settings, *, client_name: str, reply_timeout_s: float) -> Client:
    """A client that never retries by itself: every loop of ours knows better what a lost reply means.

    Does not open a connection yet. Raises ConfigError for a URL that cannot be used.
    """
    url = settings.redis_url
    scheme = urlsplit(url).scheme
    options: dict[str, Any] = {
        "socket_timeout": reply_timeout_s,
        "socket_connect_timeout": settings.connect_timeout_ms / 1000,
        "protocol": 2,  # the reply shape of XREAD differs between 2 and 3
        "decode_responses": False,
        "client_name": client_name,
    }
    plain = {**options, "retry": Retry(NoBackoff(), 0), "retry_on_timeout": False}
    try:
        if scheme in ("redis", "rediss", "unix"):
            keepalive = {} if scheme == "unix" else {"socket_keepalive": True}
            return redis.Redis.from_url(url, **plain, **keepalive)
        if scheme in ("redis+cluster", "rediss+cluster"):
            return _cluster(url, {**options, "socket_keepalive": True})
        if scheme in ("redis+sentinel", "rediss+sentinel"):
            return _sentinel(url, {**plain, "socket_keepalive": True})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis_url {redact_url(url)}: {error}") from None
    except redis.RedisError as error:  # the cluster client connects at once
        raise BusUnavailable(f"connect to {redact_url(url)}: {type(error).__name__}: {error}") from error
    raise ConfigError(
        f"redis_url {redact_url(url)}: scheme {scheme!r} is not known",
        hint="Use redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (rediss+... with TLS).",
    )


def _addresses(netloc: str) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """Credentials and host, port pairs of `user:password@h1:p1,h2:p2`."""
    credentials: dict[str, Any] = {}
    user_part, _, hosts = netloc.rpartition("@")
    if user_part:
        user, _, password = user_part.partition(":")
        credentials = {"username": unquote(user) or None, "password": unquote(password) or None}
    pairs = []
    for item in hosts.split(","):
        host, _, port = item.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{item!r} is not host:port")
        pairs.append((host.strip("[]"), int(port)))
    return credentials, pairs


def _query_options(query: str) -> dict[str, Any]:
    """TLS and other redis-py options given in the URL's query, as redis-py itself parses them."""
    pool = redis.ConnectionPool.from_url(urlunsplit(("rediss", "localhost", "", query, "")))
    given = {name for name, _ in parse_qsl(query)}
    return {name: value for name, value in pool.connection_kwargs.items() if name in given}


def _cluster(url: str, options: dict[str, Any]) -> Client:
    parts = urlsplit(url)
    credentials, pairs = _addresses(parts.netloc)
    nodes = [ClusterNode(host, port) for host, port in pairs]  # type: ignore[no-untyped-call]
    if parts.scheme.startswith("rediss"):
        options["ssl"] = True
    options |= credentials | _query_options(parts.query)
    # One retry, to follow a slot that has moved; a second lost reply is the caller's to judge.
    return RedisCluster(startup_nodes=nodes, retry=Retry(NoBackoff(), 1), **options)


def _sentinel(url: str, options: dict[str, Any]) -> Client:
    parts = urlsplit(url)
    credentials, pairs = _addresses(parts.netloc)
    path = [part for part in parts.path.split("/") if part]
    if not path:
        raise ValueError("the path must name the master, as in redis+sentinel://host:26379/mymaster/0")
    tls = {"ssl": True} if parts.scheme.startswith("rediss") else {}
    query = dict(parse_qsl(parts.query))
    sentinel_password = query.pop("sentinel_password", None)
    more = {**tls, **_query_options(urlencode(query))}
    sentinel_options = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout", "retry")} | more
    if sentinel_password:
        sentinel_options["password"] = sentinel_password
    options |= credentials | more
    sentinel = Sentinel(pairs, sentinel_kwargs=sentinel_options, **options)  # type: ignore[no-untyped-call]
    return sentinel.master_for(path[0], db=int(path[1]) if len(path) > 1 else 0)  # type: ignore[no-untyped-call]


_MAX_HEADS = 64
_FLAGS_UNKNOWN = "unexpected symbol near '#'"


class Script:
    """A Lua script, run by its digest.

    allow_oom: it writes only to what is bounded anyway, so it may run when maxmemory is reached: results and
    checkpoints go on while new commands are refused.
    """

    def __init__(self, source: str, *, allow_oom: bool = False) -> None:
        self._sources = [f"#!lua flags=allow-oom\n{source}", source] if allow_oom else [source]
        self._digests = [hashlib.sha1(text.encode()).hexdigest() for text in self._sources]
        # By connection pool: one process may talk to a server that knows the flags, and to fakeredis, which does not.
        self._without_flags: weakref.WeakSet[Any] = weakref.WeakSet()
        self._heads: dict[tuple[str, ...], Packed] = {}

    def queue(self, pipe: Client, keys: Sequence[str], args: Sequence[Argument]) -> None:
        """Add the call to a pipeline. The script must have run once before on this server, see `load`."""
        pipe.evalsha(self._digests[self._form(pipe)], len(keys), *keys, *args)

    def run(self, client: Client, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Raises what redis-py raises."""
        form = self._form(client)
        try:
            try:
                return client.evalsha(self._digests[form], len(keys), *keys, *args)
            except redis.exceptions.NoScriptError:
                return client.eval(self._sources[form], len(keys), *keys, *args)
        except redis.ResponseError as error:
            # fakeredis' Lua does not know the first line with the flags, and keeps such a script all the same.
            if form + 1 < len(self._sources) and _FLAGS_UNKNOWN in str(error):
                self._without_flags.add(client.connection_pool)
                return self.run(client, keys, args)
            raise

    def run_on(self, line: Line, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """The same over a connection that is held. Raises what redis-py raises."""
        try:
            return line.call((self._head(self._digests[self._form(line.client)], keys), *args))
        except redis.ResponseError as error:
            if isinstance(error, redis.exceptions.NoScriptError) or _FLAGS_UNKNOWN in str(error):
                return self.run(line.client, keys, args)  # nothing of it has been run
            raise

    def _head(self, digest: str, keys: Sequence[str]) -> Packed:
        """The call up to its arguments: the same at every call of one process, as a rule."""
        named = (digest, *keys)
        head = self._heads.get(named)
        if head is None:
            if len(self._heads) >= _MAX_HEADS:
                self._heads.clear()  # names of workers come and go
            head = self._heads[named] = Packed.of(("EVALSHA", digest, len(keys), *keys))
        return head

    def _form(self, client: Client) -> int:
        return int(getattr(client, "connection_pool", None) in self._without_flags) if self._without_flags else 0


class ServerClock:
    """The server's time, carried on with this process's monotonic clock: a wrong wall clock does no harm."""

    def __init__(self) -> None:
        self._offset_ms: float | None = None
        self._set_at = 0.0

    @property
    def known(self) -> bool:
        return self._offset_ms is not None

    @property
    def age_s(self) -> float:
        """Seconds since the offset was last measured."""
        return time.monotonic() - self._set_at if self.known else float("inf")

    def set(self, server_ms: int, sent_at: float, received_at: float) -> None:
        """server_ms: the server's answer; sent_at, received_at: time.monotonic() around the call."""
        self._offset_ms = server_ms - (sent_at + received_at) / 2 * 1000
        self._set_at = received_at

    def now_ms(self) -> int:
        """Milliseconds since 1970 by the server's clock; by this machine's until the server was first asked."""
        if self._offset_ms is None:
            return int(time.time() * 1000)
        return int(time.monotonic() * 1000 + self._offset_ms)


class Bus:
    """One process's way to one namespace. Safe for threads; after a fork the child gets its own connections.

    `client` is for calls that answer at once. A loop that blocks makes a client of its own with `blocking_client`.
    """

    def __init__(self, settings: Settings, *, client_name: str = "kvbus", client: Client | None = None) -> None:
        self.settings = settings
        self.keys = Keys(settings.namespace)
        self.clock = ServerClock()
        self._name = client_name
        self._given = client
        self._client: Client | None = client
        self._lock = threading.Lock()
        self._made: list[Client] = []

    @property
    def client(self) -> Client:
        """The shared client for short calls. Raises BusUnavailable if a cluster cannot be reached."""
        with self._lock:
            if self._client is None:
                self._client = self._connect("", self.settings.reply_timeout_ms / 1000)
            return self._client

    def line(self) -> Line | None:
        """A connection for a caller to hold; None where the client is not a plain one. Raises BusUnavailable."""
        client = self.client
        return Line(client) if can_hold(client) else None

    def blocking_client(self) -> Client:
        """A client of its own for one loop of XREAD BLOCK: its replies may take block_ms longer."""
        if self._given is not None:
            return self._given
        timeout = (self.settings.block_ms + self.settings.reply_timeout_ms) / 1000
        with self._lock:
            return self._connect("-read", timeout)

    def _connect(self, suffix: str, timeout_s: float) -> Client:
        client = connect(self.settings, client_name=self._name + suffix, reply_timeout_s=timeout_s)
        self._made.append(client)
        return client

    def server_time_ms(self) -> int:
        """Ask the server for its time and set the clock by it. Raises BusError."""
        sent = time.monotonic()
        with bus_errors("TIME"):
            seconds, micros = self.client.time()
        self.clock.set(seconds * 1000 + micros // 1000, sent, time.monotonic())
        return self.clock.now_ms()

    def now_ms(self, *, max_age_s: float = 60.0) -> int:
        """Server time, asking again when the last answer is older than max_age_s. Raises BusError."""
        return self.clock.now_ms() if self.clock.age_s < max_age_s else self.server_time_ms()

    def server_version(self) -> str:
        """The server's kind and version, such as "valkey 9.1.2". Raises BusError."""
        with bus_errors("INFO server"):
            info = self.client.info("server")
        if "valkey_version" in info:
            return f"valkey {info['valkey_version']}"
        return f"redis {info['redis_version']}"

    def risky_eviction(self) -> str | None:
        """The server's maxmemory-policy if it may remove whole streams (allkeys-*), else None. Raises BusError."""
        try:
            with bus_errors("INFO memory"):
                memory = self.client.info("memory")
        except BusRefused:
            return None  # a user without this right; `kvbus doctor` looks with another one
        policy = str(memory.get("maxmemory_policy", ""))
        return policy if policy.startswith("allkeys") else None

    def check_role(self, client: Client) -> None:
        """Raise BusUnavailable when the connection has ended up on a replica; the next use connects anew.

        A read on a replica or on a master that was left behind is not refused, it is just empty.
        """
        if isinstance(client, RedisCluster):
            return  # the cluster client follows the slot map by itself
        try:
            with bus_errors("ROLE"):
                role = client.role()
        except BusRefused:
            return  # a user without this right, or a server that has no roles
        kind = role[0] if isinstance(role, list | tuple) else role
        if kind not in (b"master", "master"):
            client.connection_pool.disconnect()
            raise BusUnavailable(f"{redact_url(self.settings.redis_url)} has become a {_text(kind)}")
        pool = client.connection_pool
        if hasattr(pool, "sentinel_manager"):
            with bus_errors("ask Sentinel for the master"):
                known = pool.sentinel_manager.discover_master(pool.service_name)
            if pool.master_address is not None and tuple(known) != tuple(pool.master_address):
                pool.disconnect()
                raise BusUnavailable(f"the master moved from {pool.master_address} to {known}")

    def interrupt(self, client: Client) -> None:
        """End whatever another thread waits for on this client: its call fails at once.

        A client that this Bus was given is left alone, for others may use it: there a wait ends after block_ms.
        """
        if client is self._given:
            return
        pools = (
            [
                node.redis_connection.connection_pool
                for node in client.nodes_manager.nodes_cache.values()
                if node.redis_connection
            ]
            if isinstance(client, RedisCluster)
            else [client.connection_pool]
        )
        for pool in pools:
            # Not pool.disconnect(): it takes the socket away from under the thread that waits on it, whose call then
            # fails with TypeError or whatever its parser trips over. A socket that is shut down reads as ended.
            for connection in list(getattr(pool, "_in_use_connections", ())):
                waiting = getattr(connection, "_sock", None)
                if waiting is not None:
                    with contextlib.suppress(OSError):
                        waiting.shutdown(socket.SHUT_RDWR)

    def discard(self, client: Client) -> None:
        """Close a client that `blocking_client` made."""
        if client is self._given:
            return
        with self._lock:
            self._made = [made for made in self._made if made is not client]
        with contextlib.suppress(redis.RedisError, OSError):
            client.close()

    def close(self) -> None:
        """Close all connections. The Bus can be used again afterwards: it connects anew."""
        with self._lock:
            made, self._made, self._client = self._made, [], self._given
        for client in made:
            with contextlib.suppress(redis.RedisError, OSError):
                client.close()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
