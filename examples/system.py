"""A whole kvbus system on one machine, as child processes: a real Valkey, real LMCache workers, the facade.

with System(Path("data"), ranks=2) as system:
    system.store(tokens, seed=1)
    print(system.facade_url)
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

from kvbus.embedded import EmbeddedServer
from kvbus.settings import Settings, load_settings

START_S = 300.0
"""LMCache and torch take seconds to load, minutes on a machine that is overloaded."""


class WorkerProcess:
    """One `python -m worker_plugin.standalone` with its control lines. options: more of its arguments."""

    def __init__(
        self,
        *,
        url: str,
        namespace: str,
        instance: str,
        rank: int,
        world_size: int,
        disk: Path,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.name = f"{instance}/{rank}"
        self.rank = rank
        self._command = [
            *(sys.executable, "-m", "worker_plugin.standalone", "--control"),
            *("--redis-url", url, "--namespace", namespace, "--instance", instance),
            *("--rank", str(rank), "--world-size", str(world_size), "--disk", str(disk)),
            *options,
        ]
        # One thread each: several engines share few cores.
        quiet = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        self._env = os.environ | quiet | {"OMP_NUM_THREADS": "1"} | (env or {})
        self._log_path = disk.parent / f"worker-{instance}-{rank}.log"
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the process; `wait_ready` waits for it."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                start_new_session=True,  # Ctrl-C is for us; we stop the workers in good order
            )
        return self

    def wait_ready(self) -> dict[str, Any]:
        """The line that tells it is ready. Raises RuntimeError with the log's last lines if none comes."""
        return self._read()

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """One control line and its answer. Raises RuntimeError when the worker could not do it."""
        with self._lock:
            assert self.process is not None
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"op": op} | request).encode() + b"\n")
            self.process.stdin.flush()
            answer = self._read()
        if not answer.get("ok"):
            raise RuntimeError(f"worker {self.name}: {op}: {answer.get('error')}")
        return answer

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        if self.process is not None:
            self.process.kill()
            self._reap()

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and the exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self._reap()

    def _reap(self) -> int:
        assert self.process is not None
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def _read(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        # A line is asked for at a time, so none waits in the pipe's buffer, where select would not see it.
        if not select.select([self.process.stdout], [], [], START_S)[0]:
            raise RuntimeError(f"worker {self.name} has said nothing for {START_S:g} s:\n{self._log_tail()}")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self.name} ended with code {self.process.wait()}:\n{self._log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-2000:]


class System:
    """Server, workers and facade of one namespace, started together and stopped together.

    data: a directory for everything that they write. cpu_gb: DDR of each rank. options: more arguments of every worker.
    server_options: more settings of the server, by their names in its configuration.
    """

    def __init__(
        self,
        data: Path,
        *,
        namespace: str = "default",
        instance: str = "llm-a",
        ranks: int = 4,
        cpu_gb: float = 0.1,
        chunk_size: int = 64,
        facade: bool = True,
        redis_port: int = 0,
        facade_port: int = 0,
        options: Sequence[str] = (),
        server_options: Mapping[str, str] | None = None,
    ) -> None:
        self.namespace = namespace
        self.server = EmbeddedServer(data / "valkey", port=redis_port, options=server_options)
        self._data = data
        self._facade_wanted = facade
        self._facade_port = facade_port
        self._facade: subprocess.Popen[bytes] | None = None
        self.workers: list[WorkerProcess] = []
        self._make_worker: Callable[[int], WorkerProcess] = lambda rank: WorkerProcess(
            url=self.server.url,
            namespace=namespace,
            instance=instance,
            rank=rank,
            world_size=ranks,
            disk=data / "ssd" / f"rank{rank}",
            options=["--cpu-gb", str(cpu_gb), "--chunk-size", str(chunk_size), *options],
        )
        self._ranks = ranks

    def start(self) -> None:
        """Start all; raises with the log's last lines when a part does not come up."""
        self.server.start()
        if self._facade_wanted:
            self._start_facade()
        for rank in range(self._ranks):  # one by one: those that were started are stopped, whatever the next does
            worker = self._make_worker(rank)
            self.workers.append(worker)
            worker.start()
        for worker in self.workers:
            worker.wait_ready()
        if self._facade is not None:
            self._await_facade()

    def stop(self) -> None:
        """Stop workers, facade and server, in this order."""
        for worker in self.workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.process.terminate()
        for worker in self.workers:
            worker.stop()
        if self._facade is not None:
            self._facade.terminate()
            try:
                self._facade.wait(10)
            except subprocess.TimeoutExpired:
                self._facade.kill()
                self._facade.wait()
        self.server.stop()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def facade_url(self) -> str:
        return f"http://127.0.0.1:{self._facade_port}"

    def settings(self, **values: Any) -> Settings:
        """Settings of a client of this system."""
        return load_settings({"redis_url": self.server.url, "namespace": self.namespace} | values)

    def ask_all(self, op: str, **request: Any) -> list[dict[str, Any]]:
        """The same control line to every worker at once; answers by rank."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(lambda worker: worker.ask(op, **request), self.workers))

    def store(self, tokens: Sequence[int], seed: int) -> list[str]:
        """Store a text's KV on every rank, as a finished request would; returns its chunk hashes."""
        answers = self.ask_all("store", tokens=list(tokens), seed=seed)
        hashes: list[str] = answers[0]["chunk_hashes"]
        if any(answer["chunk_hashes"] != hashes for answer in answers):
            raise RuntimeError("the ranks do not agree on the chunk hashes")
        return hashes

    def _start_facade(self) -> None:
        self._facade_port = self._facade_port or _free_port()
        env = os.environ | {
            "KVBUS_REDIS_URL": self.server.url,
            "KVBUS_NAMESPACE": self.namespace,
            "KVBUS_REST_PORT": str(self._facade_port),
        }
        with (self._data / "facade.log").open("ab") as log:
            self._facade = subprocess.Popen(
                [sys.executable, "-m", "kvbus.cli.main", "serve"], stdout=log, stderr=log, env=env
            )

    def _await_facade(self) -> None:
        assert self._facade is not None
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urlopen(f"{self.facade_url}/healthz", timeout=2):
                    return
            except OSError as error:
                ended = self._facade.poll()
                if ended is not None or time.monotonic() > deadline:
                    tail = (self._data / "facade.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the facade did not come up ({error}; exit code {ended}):\n{tail}") from None
                time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
