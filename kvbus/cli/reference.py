"""The CLI page of the docs, made from the program itself: python -m kvbus.cli.reference > docs/cli.md"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import typer.main

from kvbus.cli.app import build
from kvbus.cli.common import EXAMPLES, PANEL
from kvbus.cli.errors import known_errors
from kvbus.cli.exits import MEANING

INTRO = """\
# The command line

This page is made from the program: `python -m kvbus.cli.reference > docs/cli.md`. A test holds them together, and runs
every example.

`pip install 'kvbus[cli]'` brings `kvbus`. Data go to stdout, notes and errors to stderr. On a terminal data are tables
and lines of text, in a pipe JSON lines, one object a line; `--json` and `--table` choose. Times are the server's. A
chunk hash may be given as it is, with its minus. Ctrl-C ends whatever goes on; a pipe that is closed (`| head`) is no
error.
"""

PROFILES = """\
## Settings and profiles

Every setting is an environment variable `KVBUS_<NAME>`, `KVBUS_REDIS_URL` and `KVBUS_NAMESPACE` above all. A profile is
a set of settings with a name, in `~/.config/kvbus/profiles.toml` (or the file that `KVBUS_PROFILES_FILE` names):

```toml
[prod]
redis_url = "rediss://operator:secret@kv.example:6380/0"
namespace = "llama-70b"
```

`--profile prod` or `KVBUS_PROFILE=prod` takes it. Options go before the profile, the profile before other variables.

## Completion

`kvbus --install-completion` for the present shell, or `kvbus completion bash|zsh|fish` to print the script.

## Recordings

`kvbus record` writes a file of checksummed, compressed blocks of entries as they stood in their streams. One that was
torn by a kill or a full disk is sound up to there: `kvbus verify` says how far, `kvbus record --append` goes on behind
it. `kvbus replay` writes the entries once more; they keep their content, get new message ids and issue times, and name
the original in the entry's field `origin`. How far a replay has come is written in the same transaction as its entries:
after an interruption `--resume` goes on without a repeat and without a hole.

A recording holds what passed over the bus, not the KV: workers that are to end in the same state must hold the same
chunks before a replay of prefetches and evicts.

## From Python

What a command shows is a module of `kvbus.ops` that returns data and prints nothing: `kvbus.ops.lag.read_lag(bus)`,
`kvbus.ops.doctor.examine(settings)`, `kvbus.ops.explain.explain_chunk(bus, chunk)`, `kvbus.ops.replay.Replay(...)`.
"""


def render() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(build())
    parts = [INTRO, "## Exit codes\n\n| code | meaning |\n|---|---|"]
    parts += [f"| {int(code)} | {meaning} |" for code, meaning in MEANING.items()]
    parts += ["", "## Errors\n", "An error names its code, the value, the cause and the next step.", ""]
    parts += ["| code | exit | meaning |\n|---|---|---|"]
    parts += [f"| `{error.code}` | {error.exit_code} | {_cell(error.meaning)} |" for error in known_errors()]
    parts += [
        "",
        PROFILES,
        "## Options for every command\n",
        "They may stand before the command's name or behind it.\n",
    ]
    parts += _options([param for param in root.params if _panel(param) == PANEL])
    parts += ["", "## Commands", ""]
    for name, found in _commands(root):
        parts += list(_command(name, found))
    return "\n".join(parts).rstrip() + "\n"


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from _commands(found, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", found


def _command(name: str, found: Any) -> Iterator[str]:
    yield f"### kvbus {name}\n"
    yield inspect.cleandoc(found.help or "") + "\n"
    own = [param for param in found.params if _panel(param) != PANEL and param.name != "help"]
    if own:
        yield from _options(own)
        yield ""
    examples = EXAMPLES.get(name, ())
    if examples:
        yield "```sh"
        yield from examples
        yield "```\n"


def _options(params: list[Any]) -> Iterator[str]:
    yield "| option | meaning |"
    yield "|---|---|"
    for param in params:
        yield f"| {_cell(_names(param))} | {_cell(_meaning(param))} |"


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        name = param.metavar or param.name.upper()
        more = "..." if param.nargs == -1 else ""
        return f"`{name}{more}`" if param.required else f"`[{name}]{more}`"
    flags = [*param.opts, *param.secondary_opts]
    value = "" if param.is_flag else f" {param.metavar or param.name.upper()}"
    return ", ".join(f"`{flag}{value}`" for flag in flags)


def _meaning(param: Any) -> str:
    text = param.help or ""
    if param.multiple and "repeated" not in text:
        text += " May be repeated."
    default = param.default
    if (
        default is not None
        and default is not False
        and default != ""
        and not param.secondary_opts
        and not callable(default)
    ):
        text += f" By itself: `{default}`."
    if param.envvar:
        text += f" Or `{param.envvar}`."
    return text


def _panel(param: Any) -> str | None:
    panel: str | None = getattr(param, "rich_help_panel", None)
    return panel


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(render())
