"""A worker without vLLM: a real LMCacheEngine on the CPU, its DDR and SSD tiers, and a place on the bus.

    python -m worker_plugin.standalone --namespace demo --instance llm-a --rank 0 --world-size 2 --disk /tmp/r0

Writes one JSON line when it is ready. With --control it then takes the part of the serving engine: each JSON line on
stdin asks for one thing, each answer is one JSON line on stdout:

    {"op": "store", "tokens": [..], "seed": 7}      store a text's KV, as a finished prefill would
    {"op": "retrieve", "tokens": [..]}              {"found": leading tokens found, "digest": blake3 of their KV bytes}
    {"op": "kv", "tokens": [..], "seed": 7}         the digest that these KV bytes have, for comparison
    {"op": "pin" | "unpin", "tokens": [..], "id": "r1"}   hold chunks as a running request does
    {"op": "usage"} {"op": "stats"} {"op": "stop"}

Ends on SIGTERM, on SIGINT, on {"op": "stop"} and, with --control, at the end of stdin. Exit codes: 0 ended in good
order, 1 a thread did not end in time, 2 usage, 4 another process has taken over the name.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from kvbus.errors import ConfigError
from kvbus.protocol.hashes import format_hash
from kvbus.settings import load_settings
from worker_plugin.runtime import Worker, WorkerState, attach

EXIT_FENCED = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to stop; returns the exit code."""
    args = _parser().parse_args(argv)
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    try:
        settings = load_settings(_settings(args))
    except ConfigError as error:
        print(f"{error}. {error.hint}", file=sys.stderr)
        return 2
    # LMCache and torch take seconds to load: not before the arguments are known to be right.
    from worker_plugin.cpu_engine import CpuEngine, CpuEngineConfig

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    config = CpuEngineConfig(
        instance_id=f"{args.instance}-{args.rank}",
        model=args.model,
        rank=args.rank,
        world_size=args.world_size,
        chunk_size=args.chunk_size,
        layers=args.layers,
        kv_heads=args.kv_heads,
        head_size=args.head_size,
        cpu_gb=args.cpu_gb,
        disk_dir=Path(args.disk) if args.disk else None,
        disk_gb=args.disk_gb,
        cache_policy=args.cache_policy,
    )
    if config.disk_dir is not None:
        config.disk_dir.mkdir(parents=True, exist_ok=True)
    with CpuEngine(config) as engine:
        worker = attach(engine.engine, settings=settings, instance=args.instance, rank=args.rank, on_fenced=stop.set)
        _say({"ready": True, "worker": worker.name, "pid": os.getpid(), "chunk_size": args.chunk_size})
        if args.control:
            control = threading.Thread(target=_control, args=(engine, worker, stop), name="control", daemon=True)
            control.start()
        stop.wait()
        ended = worker.stop()
    if worker.state is WorkerState.FENCED:
        return EXIT_FENCED
    return 0 if ended else 1


def _control(engine: Any, worker: Worker, stop: threading.Event) -> None:
    """Take the part of the serving engine, a line at a time. However it ends, the process ends with it."""
    part = ServingPart(engine, worker)
    try:
        # Not sys.stdin: a thread that waits in its buffer would crash the interpreter's end.
        with open(0, "rb", buffering=0, closefd=False) as raw:
            for line in _lines(raw):
                answer = _answer(part, line)
                if answer is None:
                    break
                _say(answer)
    except BrokenPipeError:
        pass  # nobody is left to read the answers
    finally:
        stop.set()


def _answer(part: ServingPart, line: bytes) -> dict[str, Any] | None:
    try:
        return part.answer(msgspec.json.decode(line, type=dict[str, Any]))
    except Exception as error:  # noqa: BLE001 - told to whoever asked, who decides what it means
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def _lines(raw: RawIOBase) -> Iterator[bytes]:
    rest = b""
    while piece := raw.read(1 << 20):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole


class ServingPart:
    """What a serving engine does with LMCache, for a demo or a test: store, retrieve, hold."""

    def __init__(self, engine: Any, worker: Worker) -> None:
        self._engine = engine
        self._worker = worker
        self._verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "store": self._store,
            "retrieve": self._retrieve,
            "kv": self._kv,
            "pin": self._pin,
            "unpin": self._unpin,
            "usage": self._usage,
            "stats": lambda _: worker.stats(),
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to one request; None for a stop. Raises whatever the engine raises."""
        name = request.get("op")
        if name == "stop":
            return None
        verb = self._verbs.get(str(name))
        if verb is None:
            raise ValueError(f"op {name!r} is not one of {', '.join(sorted(self._verbs))}, stop")
        return {"ok": True} | verb(request)

    def _store(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens = request["tokens"]
        self._engine.store(tokens, self._engine.random_kv(len(tokens), self._seed(request)), tags=_tags(request))
        self._engine.wait_stored()
        return {"chunk_hashes": [format_hash(found) for found in self._engine.chunk_hashes(tokens)]}

    def _retrieve(self, request: dict[str, Any]) -> dict[str, Any]:
        found, kv = self._engine.retrieve(request["tokens"], tags=_tags(request))
        return {"found": found, "digest": _digest(kv, found)}

    def _kv(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens = request["tokens"]
        return {"digest": _digest(self._engine.random_kv(len(tokens), self._seed(request)), len(tokens))}

    def _pin(self, request: dict[str, Any]) -> dict[str, Any]:
        found = self._engine.engine.lookup(tokens=request["tokens"], lookup_id=request["id"], pin=True)
        return {"found": int(found)}

    def _unpin(self, request: dict[str, Any]) -> dict[str, Any]:
        self._engine.engine.lookup_unpin(request["id"])
        return {}

    def _usage(self, request: dict[str, Any]) -> dict[str, Any]:
        usage = self._worker.engine.usage()
        return msgspec.to_builtins(usage) | {"clean": usage.clean}  # type: ignore[no-any-return]

    def _seed(self, request: dict[str, Any]) -> int:
        # every rank holds another shard of the same text
        return int(request["seed"]) * 1000 + int(self._engine.config.rank)


def _tags(request: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(value)) for name, value in request.get("tags", ()))


def _digest(kv: Any, tokens: int) -> str:
    return blake3(kv[:, :, :tokens].contiguous().numpy().tobytes()).hexdigest()[:32]


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    given = {"namespace": args.namespace, "redis_url": args.redis_url, "prefetch_max_share": args.max_share}
    return {name: value for name, value in given.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker_plugin.standalone", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--namespace", help="default: KVBUS_NAMESPACE, else `default`")
    parser.add_argument("--redis-url", help="default: KVBUS_REDIS_URL, else redis://127.0.0.1:6379/0")
    parser.add_argument("--instance", required=True, help="name of the model server")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--disk", help="directory of the SSD tier; absent: no SSD tier")
    parser.add_argument("--disk-gb", type=float, default=5.0)
    parser.add_argument("--cpu-gb", type=float, default=0.1, help="size of the DDR tier")
    parser.add_argument("--max-share", type=float, help="share of DDR that prefetches may fill")
    parser.add_argument("--model", default="kvbus-demo")
    parser.add_argument("--chunk-size", type=int, default=64, help="tokens a chunk")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--cache-policy", default="LRU")
    parser.add_argument("--control", action="store_true", help="take the serving engine's part on stdin and stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
