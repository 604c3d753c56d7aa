"""Start real vLLM processes as an operator would: only settings, environment and vLLM's own options."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from tests.e2e.host import AUTHKEY

ROOT = Path(__file__).parents[2]
CHUNK_SIZE = 64
START_S = 420
CALL_S = 120
STOP_S = 60


class Options:
    """What one vLLM process runs with.

    env: on top of the common environment. lmcache: LMCACHE_* by their names. kvbus: KVBUS_* by their names.
    extra: kv_connector_extra_config. vllm: arguments of vllm.LLM, or options of the server.
    """

    def __init__(self, directory: Path, model: Path, *, url: str, namespace: str) -> None:
        self.directory = directory
        self.model = model
        self.disk = directory / "ssd"
        self.env: dict[str, str] = {"PYTHONHASHSEED": "0"}
        self.lmcache: dict[str, str] = {
            "CHUNK_SIZE": str(CHUNK_SIZE),
            "LOCAL_CPU": "true",
            "MAX_LOCAL_CPU_SIZE": "0.2",
            "LOCAL_DISK": str(self.disk),
            "MAX_LOCAL_DISK_SIZE": "1",
            "TRACK_USAGE": "false",
        }
        self.kvbus: dict[str, str] = {"REDIS_URL": url, "NAMESPACE": namespace, "INSTANCE": "e2e"}
        self.extra: dict[str, Any] = {}
        self.vllm: dict[str, Any] = {}

    def transfer_config(self) -> dict[str, Any]:
        return {
            "kv_connector": "KVBusConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "worker_plugin.connector",
            "kv_connector_extra_config": self.extra,
        }

    def environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("KVBUS_", "LMCACHE_"))}
        env.pop("PYTHONHASHSEED", None)
        env |= common_environment() | self.env
        env |= {f"LMCACHE_{name}": value for name, value in self.lmcache.items()}
        env |= {f"KVBUS_{name}": value for name, value in self.kvbus.items()}
        return env


def common_environment() -> dict[str, str]:
    """What vLLM 0.18 needs to run on a CPU at all: its worker refuses to start without both preloaded libraries."""
    tcmalloc = glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4")
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if not tcmalloc or not openmp.exists():
        pytest.fail("vLLM's CPU worker needs libtcmalloc-minimal4 (apt-get install) and intel-openmp (pip install)")
    return {
        "LD_PRELOAD": f"{tcmalloc[0]}:{openmp}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(ROOT),
    }


class VllmProcess:
    """A child process with all its children: its log in a file, its end certain."""

    def __init__(self, options: Options, command: list[str]) -> None:
        options.directory.mkdir(parents=True, exist_ok=True)
        options.disk.mkdir(exist_ok=True)
        self.options = options
        self.log = options.directory / "vllm.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=options.directory,
                env=options.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> dict[int, int]:
        """Rank to process id, of workers that are processes of their own (more than one rank)."""
        found = {}
        for child in self.children():
            title = " ".join(child.cmdline())
            if "VLLM::Worker" in title:
                found[int(title.rpartition("TP")[2].split("_")[0])] = child.pid
        return found

    def stop(self) -> None:
        """As an operator would, by SIGTERM; what is left after STOP_S is killed."""
        children = self.children()
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(children, STOP_S / 4)
        for child in alive:
            child.kill()

    def last_lines(self, count: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def fail(self, message: str) -> None:
        pytest.fail(f"{message}\n--- the end of {self.log}\n{self.last_lines()}")


class Engine(VllmProcess):
    """vllm.LLM in a process of its own."""

    def __init__(self, options: Options) -> None:
        address = str(options.directory / "host.sock")
        options.directory.mkdir(parents=True, exist_ok=True)
        arguments = {
            "model": str(options.model),
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_model_len": 2048,
            "kv_transfer_config": options.transfer_config(),
            **options.vllm,
        }
        self._listener = Listener(address, family="AF_UNIX", authkey=AUTHKEY)
        super().__init__(options, [sys.executable, "-m", "tests.e2e.host", address, json.dumps(arguments)])
        self._connection: Connection | None = None
        try:
            self._connection = self._accept()
            self._receive(START_S)
        except BaseException:  # also pytest's own outcomes: a process that nobody holds would live on
            self.stop()
            raise

    def call(self, name: str, **arguments: Any) -> Any:
        """Run a method of tests.e2e.host.Host there and return its result."""
        self.send(name, **arguments)
        return self.receive()

    def send(self, name: str, **arguments: Any) -> None:
        assert self._connection is not None
        self._connection.send((name, arguments))

    def receive(self) -> Any:
        return self._receive(CALL_S)

    def generate(self, *prompts: list[int], **more: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("generate", prompts=list(prompts), **more)
        return found

    def stop(self) -> None:
        if self._connection is not None:
            try:
                self._connection.send(("stop", {}))
                self._connection.poll(STOP_S)
            except OSError:  # it has ended already
                pass
            self._connection.close()
        super().stop()
        self._listener.close()

    def _accept(self) -> Connection:
        self._listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
        try:
            return self._listener.accept()
        except TimeoutError:
            self.fail(f"vLLM did not start within {START_S} s")
            raise

    def _receive(self, timeout: float) -> Any:
        assert self._connection is not None
        try:
            if not self._connection.poll(timeout):
                self.fail(f"no answer within {timeout} s")
            state, value = self._connection.recv()
        except EOFError:
            self.fail("the engine's process has ended")
            raise
        if state == "failed":
            self.fail(f"the engine raised:\n{value}")
        return value


def pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
