"""How the ledger behaves: from a TOML file's [llm] and [memory] tables, and from KVBUS_MEMORY_* variables."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvbus.errors import ConfigError
from kvbus.protocol.commands import DDR
from kvbus.protocol.limits import Name, Ttl
from kvbus.settings import Settings

NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
MAX_SESSIONS = 1_000_000

_LLM = ("kvcache_enabled", "kvcache_debug_enabled")


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that can be set about the ledger. Times in milliseconds, budgets in chunks, 0 for no limit."""

    kvcache_enabled: bool = True
    """Off: the ledger takes no event and gives no command."""
    kvcache_debug_enabled: bool = False
    """One JSON file a turn in debug_dir: the chunks before and after, the difference, the commands."""
    debug_dir: str = "kvcache_debug"
    debug_keep: Positive = 1_000
    """How many of these files are kept, the newest."""

    ddr_budget_chunks: NotNegative = 0
    """Chunks that fit into one worker's DDR. Above it, chunks of the sessions used the longest ago leave DDR alone;
    set it only where a slower tier keeps them. 0: the engine's own policy decides."""
    ddr_tier: Name = DDR
    prefetch_sources: tuple[Name, ...] | None = None
    """The tiers that a prefetch reads from; absent: all that a worker can read."""
    evict_locations: tuple[Name, ...] | None = None
    """The tiers that a chunk leaves when nobody holds it any more; absent: all."""

    grace_ms: NotNegative = 1_000
    """How long a chunk that nobody holds is kept: a request that nobody announced may be using it."""
    prefetch_ttl_ms: Ttl = 30_000
    evict_ttl_ms: Ttl = 15_000
    """Short: a chunk that is in use for longer is looked at anew, for somebody may hold it by then."""
    retry_ms: Positive = 1_000
    """How long after a worker could not remove a chunk it is looked at again."""
    request_ms: Positive = 600_000
    """A request that was announced and never ends counts as over after this time."""
    session_ms: Positive = 86_400_000
    """A session that nobody uses for this time is closed."""
    closed_ms: NotNegative = 60_000
    """Late events of a closed session do not open it again for this time, unless a request for it was announced."""
    max_sessions: Annotated[int, msgspec.Meta(ge=1, le=MAX_SESSIONS)] = 100_000
    """Above it the least recently used are closed."""
    tenant_sessions: NotNegative = 0
    tenant_chunks: NotNegative = 0
    """The same for each tenant: sessions, and their chunks' sum."""
    hot_sessions: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 8
    """A worker that starts, or that missed commands, is sent a prefetch of this many newest sessions."""


def load_config(
    path: str | Path | None = None, env: Mapping[str, str] | None = None, settings: Settings | None = None
) -> MemoryConfig:
    """The configuration. Environment first, then the file, then `settings`. Raises ConfigError, naming the offender.

    The file's [llm] table holds kvcache_enabled and kvcache_debug_enabled beside keys of others, which are left
    alone; its [memory] table holds the rest, and is ours. In the environment the names are KVBUS_KVCACHE_ENABLED,
    KVBUS_KVCACHE_DEBUG_ENABLED, and KVBUS_MEMORY_<NAME> for the rest. path: None takes KVBUS_MEMORY_FILE, if set.
    """
    source = os.environ if env is None else env
    values: dict[str, Any] = {name: getattr(settings, name) for name in _LLM} if settings is not None else {}
    origin: dict[str, str] = {}
    for name, value, where in (*_from_file(path or source.get("KVBUS_MEMORY_FILE")), *_from_env(source)):
        values[name], origin[name] = value, where
    try:
        return msgspec.convert(values, MemoryConfig, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        place = text.rpartition("`$.")[2].partition("`")[0].partition("[")[0] if "`$." in text else ""
        raise ConfigError(f"{origin.get(place, place)}={values.get(place)!r}: {text.partition(' - at')[0]}") from None


def _from_file(path: str | Path | None) -> list[tuple[str, Any, str]]:
    if not path:
        return []
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="Name a TOML file that exists.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    found = []
    for table in ("llm", "memory"):
        given = tables.get(table, {})
        if not isinstance(given, dict):
            raise ConfigError(f"{path}: {table} is not a table")
        for name, value in given.items():
            if table == "llm" and name not in _LLM:
                continue
            if name not in MemoryConfig.__struct_fields__:
                raise ConfigError(f"{path}: unknown setting [{table}] {name}")
            if isinstance(value, str) and name in _LLM:
                raise ConfigError(f"{path}: [{table}] {name}={value!r} is not true or false")
            found.append((name, value, f"{path}: [{table}] {name}"))
    return found


def _from_env(env: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    found: list[tuple[str, Any, str]] = []
    for name in MemoryConfig.__struct_fields__:
        variable = f"KVBUS_{name.upper()}" if name in _LLM else f"KVBUS_MEMORY_{name.upper()}"
        text = env.get(variable, "")
        if text == "":
            continue
        value: Any = text
        if name in ("prefetch_sources", "evict_locations"):
            value = tuple(part.strip() for part in text.split(","))
        elif text.strip().lower() in ("yes", "on", "no", "off"):
            value = text.strip().lower() in ("yes", "on")
        found.append((name, value, variable))
    return found
