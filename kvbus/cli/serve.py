"""kvbus up, kvbus serve"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from kvbus.cli.common import Cli, command, stopped_by_signal
from kvbus.cli.exits import ExitCode
from kvbus.embedded import EmbeddedServer
from kvbus.errors import BusUnavailable, ConfigError, MissingExtra
from kvbus.streams.keys import Keys

CHECK_S = 0.5


def register(app: typer.Typer) -> None:
    command(app, "up", examples=("kvbus up", "kvbus up --data ~/kvbus-data --port 7000"))(up)
    command(app, "serve", examples=("kvbus serve", "kvbus serve --port 8080"))(serve)


def up(
    cli: Cli,
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="Where the server keeps its append-only file.")
    ] = Path(".data/kvbus"),
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65_535, help="TCP port; 0 takes a free one.")
    ] = 6379,
    socket: Annotated[
        Path | None, typer.Option("--socket", metavar="PATH", help="Listen on this unix socket, too.")
    ] = None,
) -> ExitCode:
    """Run a real Valkey for this machine until Ctrl-C: data on disk, nothing evicted, 127.0.0.1 only."""
    keys = Keys(cli.settings.namespace)
    with stopped_by_signal() as stop, EmbeddedServer(data, port=port, unix_socket=socket) as server:
        told = {"url": server.url, "port": server.port, "pid": server.pid, "version": server.version, "data": str(data)}
        tag = "" if cli.settings.namespace == "default" else f"\n  export KVBUS_NAMESPACE={cli.settings.namespace}"
        text = Text.assemble(
            (f"{server.version} on {server.url}", "bold"),
            f"  (data in {server.data_dir})\n\n  export KVBUS_REDIS_URL={server.url}{tag}\n",
            f"  redis-cli -p {server.port} XREAD BLOCK 0 STREAMS '{keys.events}' '$'\n",
            f"  redis-cli -p {server.port} XADD '{keys.commands}' '*' type evict ",
            """json '{"chunk_hashes":["3f5c45ecbab5e9fd"]}'\n""",
        )
        cli.out.line(told, text)
        cli.out.note("Ctrl-C stops it.")
        while server.running:
            if stop.wait(CHECK_S):
                # A second Ctrl-C must not interrupt the clean stop: the append-only file is written out.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                cli.out.note("stopping")
                return ExitCode.OK
        lines = "".join(f"\n    {line}" for line in server.last_log_lines())
        raise BusUnavailable(
            f"the server ended by itself; its last log lines:{lines}", hint=f"The whole log is in {server.log_path}."
        )


def serve(
    cli: Cli,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Instead of KVBUS_REST_HOST.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", min=0, max=65_535, help="Instead of KVBUS_REST_PORT.")
    ] = None,
) -> ExitCode:
    """Serve the REST facade (POST /memory/prefetch, /memory/evict, ...) until Ctrl-C."""
    given = {"rest_host": host, "rest_port": port}
    changed = {name: value for name, value in given.items() if value is not None}
    settings = msgspec.structs.replace(cli.settings, **changed) if changed else cli.settings
    try:
        from kvbus.facade.app import run
    except ImportError as error:
        if error.name is not None and error.name.startswith("kvbus"):
            raise ConfigError(f"this installation has no REST facade: {error}", hint="Install kvbus anew.") from None
        raise MissingExtra(
            f"the REST facade needs the package {error.name}", hint="Install it: pip install 'kvbus[rest]'"
        ) from None
    try:
        run(settings)
    except KeyboardInterrupt:
        pass
    return ExitCode.OK
