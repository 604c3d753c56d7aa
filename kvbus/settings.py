"""One frozen Settings for every process, from KVBUS_* variables and from a mapping; the mapping goes first."""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from kvbus.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
MIB = 1024 * 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. Each can be given as KVBUS_<NAME> in the environment."""

    # the bus
    redis_url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss://, unix://, redis+sentinel://h1:p1,h2:p2/<master>/<db>, redis+cluster://h1:p1,h2:p2."""
    namespace: str = "default"
    instance: str | None = None
    """This model server's name; absent: LMCache's instance id if someone set it, else the host name."""
    connect_timeout_ms: Positive = 2_000
    reply_timeout_ms: Positive = 3_000
    """How long a reply may take, beyond what the call itself asked the server to wait."""
    block_ms: Annotated[int, msgspec.Meta(ge=10, le=5_000)] = 2_000
    """How long one XREAD waits for news."""
    events_cap_bytes: Positive = 256 * MIB
    commands_cap_bytes: Positive = 64 * MIB
    results_cap_bytes: Positive = 128 * MIB
    dead_cap_bytes: Positive = 16 * MIB

    # every process with a name
    heartbeat_ms: Positive = 1_000
    live_ms: Positive = 5_000
    """A heartbeat that is older than this has lapsed: its process counts as dead."""
    stats_ms: Positive = 10_000
    stop_ms: Positive = 5_000
    """How long a graceful stop may take."""

    # publisher
    publish: bool = True
    buffer_events: Positive = 10_000
    buffer_bytes: Positive = 64 * MIB
    batch_events: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 64
    spool_dir: str | None = None
    """Where events wait on disk while the bus is away; absent: what does not fit the buffer is dropped and counted."""
    spool_cap_bytes: Positive = 1024 * MIB
    spool_fsync: Literal["never", "batch"] = "never"

    # worker
    consume: bool = True
    prefetch_max_share: Share = 0.8
    """The largest share of DDR that one prefetch may fill."""
    deferred_retry_ms: Positive = 200
    stuck_ms: Positive = 30_000
    """An engine call that takes longer is reported as stuck."""

    # connector in vLLM
    return_chunk_hashes: bool = True
    hash_algorithm: Literal["engine", "blake3"] = "engine"
    """engine: whatever LMCache is configured for. blake3: kvbus's own chain, the same in every process."""

    # facade
    rest_host: str = "127.0.0.1"
    rest_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 6999
    rest_token: str | None = None
    rest_root_path: str = ""
    rest_insecure: bool = False
    """Allow listening on an address other than loopback without a token."""
    rest_wait_ms: Positive = 10_000
    """How long POST /memory/evict waits for the workers."""

    # memory service
    kvcache_enabled: bool = True
    kvcache_debug_enabled: bool = False

    def __post_init__(self) -> None:
        check_name("namespace", self.namespace)
        if self.instance is not None:
            check_name("instance", self.instance)
        if self.live_ms < 2 * self.heartbeat_ms:
            raise ConfigError(f"live_ms {self.live_ms} must be at least twice heartbeat_ms {self.heartbeat_ms}")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.shown().items())
        return f"Settings({shown})"

    def shown(self) -> dict[str, Any]:
        """All settings, with passwords and tokens struck out."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        values["redis_url"] = redact_url(self.redis_url)
        if self.rest_token is not None:
            values["rest_token"] = "***"
        return values


def load_settings(
    mapping: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, *, prefix: str = ""
) -> Settings:
    """Settings from a mapping and the environment, the mapping first. Raises ConfigError, naming the offender.

    mapping: names to values; only names that begin with `prefix` (such as "kvbus.") are ours, and of these an
    unknown one is an error. env: the process's environment when None; unknown KVBUS_ names in it are left alone.
    """
    fields = Settings.__struct_fields__
    source = os.environ if env is None else env
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name in fields:
        variable = f"KVBUS_{name.upper()}"
        if source.get(variable, "") != "":
            values[name], origin[name] = source[variable], variable
    for key, value in (mapping or {}).items():
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"Did you mean {prefix}{near[0]}?" if near else None
            raise ConfigError(f"unknown setting {key!r}", hint=hint)
        values[name], origin[name] = value, key
    for name in values:
        if isinstance(values[name], str) and values[name].strip().lower() in _BOOLEANS and _is_bool(name):
            values[name] = _BOOLEANS[values[name].strip().lower()]
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        found = re.search(r"at `\$\.(\w+)`", text)
        if found and found[1] in values:
            name = found[1]
            # never the value of a secret
            value = "***" if name in ("rest_token", "redis_url") else repr(values[name])
            raise ConfigError(f"{origin[name]}={value}: {text.split(' - at ')[0]}") from None
        raise ConfigError(text) from None


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _is_bool(name: str) -> bool:
    return isinstance(getattr(_DEFAULTS, name), bool)


def check_name(what: str, value: str) -> str:
    """The value, if it can be part of a key: letters, digits and `. _ -`, 1 to 128. Raises ConfigError."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ConfigError(f"{what} {value!r:.140} is not a name", hint="Use 1 to 128 letters, digits, '.', '_' or '-'.")
    return value


def redact_url(url: str) -> str:
    """The URL without its password, nor any password among its query parameters."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "***"
    netloc = parts.netloc
    if "@" in url and "@" not in netloc:
        return "***"  # not a URL we know, such as one without its scheme: it may hold a password anywhere
    if "@" in netloc:
        user, _, host = netloc.rpartition("@")
        name = user.partition(":")[0]
        netloc = f"{name}:***@{host}" if ":" in user else f"{user}@{host}"
    query = re.sub(r"((?:^|&)[^=&]*passw[^=&]*=)[^&]*", r"\1***", parts.query, flags=re.IGNORECASE)
    start = f"{parts.scheme}://" if "://" in url else ""  # urlunsplit would make unix:///path into unix:/path
    return (
        start + netloc + parts.path + (f"?{query}" if query else "") + (f"#{parts.fragment}" if parts.fragment else "")
    )


def default_instance() -> str:
    """The host name, made fit to be part of a key."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:120] or "localhost"


_DEFAULTS = Settings()
