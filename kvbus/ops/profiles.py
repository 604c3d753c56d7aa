"""Named settings in a file, so that `--profile prod` is enough.

    # ~/.config/kvbus/profiles.toml
    [prod]
    redis_url = "rediss://kv.example:6380/0"
    namespace = "llama-70b"

The names are those of kvbus.settings. The file is KVBUS_PROFILES_FILE, else kvbus/profiles.toml under
XDG_CONFIG_HOME or ~/.config.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbus.errors import ConfigError
from kvbus.settings import Settings, load_settings


def profiles_path(env: Mapping[str, str] | None = None) -> Path:
    """Where the profiles are kept."""
    source = os.environ if env is None else env
    if given := source.get("KVBUS_PROFILES_FILE"):
        return Path(given).expanduser()
    base = source.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "kvbus" / "profiles.toml"


def read_profiles(path: Path | None = None) -> dict[str, dict[str, Any]]:
    """Every profile's own settings; none when there is no file. Raises ConfigError."""
    file = path or profiles_path()
    try:
        with file.open("rb") as opened:
            found = tomllib.load(opened)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"profiles file {file} cannot be read: {error}", hint="Correct the file.") from None
    for name, values in found.items():
        if not isinstance(values, dict):
            raise ConfigError(f"profiles file {file}: {name!r} is not a table", hint=f"Write it under [{name}].")
    return found


def profile_names() -> list[str]:
    """For completion: empty rather than an error."""
    try:
        return sorted(read_profiles())
    except ConfigError:
        return []


def load_profile(
    name: str | None, overrides: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
) -> Settings:
    """Settings from overrides first, then the named profile, then KVBUS_* variables. Raises ConfigError.

    name: None means no profile. A profile goes before the variables because it was asked for by name.
    """
    values: dict[str, Any] = {}
    if name:
        path = profiles_path(env)
        profiles = read_profiles(path)
        if name not in profiles:
            near = difflib.get_close_matches(name, profiles, n=1)
            known = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(profiles)) or 'none'}."
            raise ConfigError(f"profile {name!r} is not in {path}", hint=f"{known} `kvbus profiles` lists them.")
        values.update(profiles[name])
    values.update(overrides or {})
    return load_settings(values, env)
