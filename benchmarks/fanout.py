"""The peer: commands over HTTP, in the shape of LMCache-Ascend's /memory routes on LMCache's internal API server.

A FastAPI application under uvicorn in the scheduler's process takes POST /memory/evict and forwards the body by
urllib, in asyncio's default pool of threads, to a FastAPI application under uvicorn in every worker's process; when
all have answered it hands on the first one's answer. The workers' handlers only count, or, with --engine, call
batched_remove of a real LMCache engine.

    python -m benchmarks.fanout workers --workers 8           one process each
    python -m benchmarks.fanout scheduler --ports 5001,5002   the process that forwards
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from benchmarks.children import fork_all, until_told

FORWARD_S = 10.0


def answer(content: dict[str, Any], status: int = 200) -> PlainTextResponse:
    return PlainTextResponse(json.dumps(content), status, media_type="application/json")


def worker_app(evict: Callable[[list[int], list[str] | None], int]) -> FastAPI:
    """What listens in a worker. evict: hashes and tiers to how many pairs were removed."""
    app = FastAPI()

    @app.post("/memory/evict")
    async def evict_route(request: Request) -> PlainTextResponse:
        body = await request.json()
        hashes = [int(text, 16) for text in body["chunk_hashes"]]
        return answer({"status": "success", "num_evicted": evict(hashes, body.get("locations"))})

    return app


def scheduler_app(ports: list[int]) -> FastAPI:
    """What listens in the scheduler and forwards to all workers."""
    app = FastAPI()

    def forward(port: int, path: str, body: bytes) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=FORWARD_S) as reply:
                return reply.status, json.loads(reply.read())
        except OSError as error:
            return 503, {"error": str(error)}

    @app.post("/memory/evict")
    async def evict_route(request: Request) -> PlainTextResponse:
        body = await request.body()
        loop = asyncio.get_running_loop()
        asked = [loop.run_in_executor(None, forward, port, "/memory/evict", body) for port in ports]
        answers = await asyncio.gather(*asked)
        failures = {str(port): found for port, (status, found) in zip(ports, answers, strict=True) if status != 200}
        if failures:
            return answer({"error": "Some workers failed to process request", "failures": failures}, 500)
        return answer(answers[0][1])

    return app


def listen() -> socket.socket:
    """A listening socket whose connections send small answers at once; without that each waits 40 ms."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def run(app: FastAPI, say: Callable[[dict[str, Any]], None]) -> None:
    """Serve until told to end."""
    stop = until_told()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=600))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    listener = listen()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), name="http", daemon=True)
    thread.start()
    say({"port": listener.getsockname()[1]})
    stop.wait()
    server.should_exit = True
    thread.join(5)


def counting() -> Callable[[list[int], list[str] | None], int]:
    seen = 0

    def evict(hashes: list[int], locations: list[str] | None) -> int:
        nonlocal seen
        seen += len(hashes)
        return len(hashes)

    return evict


def main() -> int:
    """Run the workers' servers or the scheduler's until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fanout")
    parser.add_argument("part", choices=("workers", "scheduler"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ports", default="")
    parser.add_argument("--engine", type=Path, help="real LMCache engines, their files in this directory")
    args = parser.parse_args()
    if args.part == "scheduler":
        ports = [int(port) for port in args.ports.split(",")]
        return fork_all(lambda _place, say: run(scheduler_app(ports), say), 1)
    if args.engine is None:
        return fork_all(lambda _place, say: run(worker_app(counting()), say), args.workers)
    from benchmarks.fanout_engine import serve

    directory, workers = args.engine, args.workers
    return fork_all(lambda place, say: serve(place, workers, directory, say), workers)


if __name__ == "__main__":
    sys.exit(main())
