"""What one finished request costs vLLM's scheduler thread: kvbus beside vLLM's own ZmqEventPublisher, in one run.

    .venv-e2e/bin/python -m benchmarks.handoff [--requests 2500]

520 chunk hashes a request. Calls of both alternate, so that a busy machine hits both alike. Three buses: healthy (a
Valkey), black hole (takes connections, never answers), dead (nobody listens). Writes a table and out/handoff.json.
Exit code 0: not slower in any of them; 1: slower in one.

    publish   Publisher.publish against ZmqEventPublisher.publish: the hand-off to the other thread
    whole     all that KVBusConnector.request_finished adds to LMCache's own, the text of the hashes left out; beside
              it vLLM's peer with its event built
    text      the hashes' text for kv_transfer_params, apart from the rest: the response needs it, the bus does not
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvbus.embedded import EmbeddedServer
from kvbus.protocol import format_hash
from kvbus.settings import Settings

HASHES = 520
PAUSE_S = 0.0005
"""Between two requests: both publishers' threads have their turn, as between two steps of an engine."""


def main() -> int:
    """Run the three buses and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2_500)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    rows = [row for bus in (healthy, black_hole, dead) for row in measure(bus, args.requests)]
    print(f"{'bus':12}{'what':10}{'kvbus p50':>12}{'p99':>9}{'vLLM p50':>12}{'p99':>9}   microseconds")
    for row in rows:
        peer = f"{row['peer_p50_us']:12.2f}{row['peer_p99_us']:9.2f}" if "peer_p50_us" in row else ""
        print(f"{row['bus']:12}{row['what']:10}{row['p50_us']:12.2f}{row['p99_us']:9.2f}{peer}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "handoff.json").write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(row["what"] == "publish" and row["p50_us"] > row["peer_p50_us"] for row in rows))


@contextmanager
def healthy() -> Iterator[str]:
    """The URL of a Valkey."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(directory) as server:
        yield server.url


@contextmanager
def black_hole() -> Iterator[str]:
    """The URL of a listener whose connections are taken by the kernel and never answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


@contextmanager
def dead() -> Iterator[str]:
    """The URL of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"redis://127.0.0.1:{port}/0"


def measure(bus: Callable[[], Any], requests: int) -> list[dict[str, Any]]:
    """The rows of one bus."""
    with ExitStack() as stack:
        url = stack.enter_context(bus())
        side = scheduler_side(url)
        stack.callback(side.stop)
        peer, batch = vllm_publisher()
        stack.callback(peer.shutdown)
        # Nobody else makes events here, so the side's own publisher is also the one to measure alone.
        publisher = side._publisher
        hashes = make_hashes()
        request = finished_request(hashes)
        event = side._event(request, None, hashes)
        ours: list[int] = []
        theirs: list[int] = []
        whole: list[int] = []
        theirs_built: list[int] = []
        text: list[int] = []
        clock = time.perf_counter_ns
        prebuilt = batch(hashes)
        for number in range(requests):
            request.request_id = f"chatcmpl-{number}-0123abcd"
            side.tap.hashes[request.request_id] = hashes
            at = [clock()]
            publisher.publish(event) if number % 2 else side.finished(request, None, False)
            at.append(clock())
            peer.publish(prebuilt if number % 2 else batch(hashes))
            at.append(clock())
            if number % 10 == 0:
                [format_hash(found) for found in hashes]
                text.append(clock() - at[-1])
            (ours if number % 2 else whole).append(at[1] - at[0])
            (theirs if number % 2 else theirs_built).append(at[2] - at[1])
            time.sleep(PAUSE_S)
        dropped = publisher.counters.get("events_dropped")
        if dropped:
            print(f"{bus.__name__}: {dropped} of {requests} events dropped, the buffer was full", file=sys.stderr)
    name = bus.__name__.replace("_", " ")
    return [row(name, "publish", ours, theirs), row(name, "whole", whole, theirs_built), row(name, "text", text)]


def row(bus: str, what: str, ours: list[int], peer: list[int] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"bus": bus, "what": what}
    for prefix, values in (("", ours), ("peer_", peer or [])):
        if values:
            for share, name in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
                found[f"{prefix}{name}_us"] = percentile(values, share)
    return found


def percentile(values: list[int], share: float) -> float:
    """In microseconds."""
    return sorted(values)[int(share * (len(values) - 1))] / 1000


def make_hashes() -> tuple[int, ...]:
    chooser = random.Random(1)
    return tuple(chooser.getrandbits(64) - 2**63 for _ in range(HASHES))


def scheduler_side(url: str) -> Any:
    """The connector's scheduler role without vLLM's engine around it."""
    from worker_plugin.connector import SchedulerSide

    client = SimpleNamespace(token_database=None, clear_lookup_status=lambda request_id: None)
    config = SimpleNamespace(chunk_size=256, pre_caching_hash_algorithm="builtin")
    impl = SimpleNamespace(config=config, lookup_client=client, load_specs={}, _requests_priority={})
    settings = Settings(redis_url=url, namespace="bench-handoff", return_chunk_hashes=False)
    return SchedulerSide(impl, settings, "bench", "model")


def finished_request(hashes: tuple[int, ...]) -> Any:
    """A real vLLM request that has ended, with a context."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    params = {"kv_transfer_params": {"kvbus": {"session": "s1", "intent": "plan"}}}
    request = Request("r", [1] * 64, SamplingParams(max_tokens=1, extra_args=params), None)
    request.status = RequestStatus.FINISHED_STOPPED
    return request


def vllm_publisher() -> tuple[Any, Callable[[tuple[int, ...]], Any]]:
    """vLLM's publisher without a subscriber, and how its engine would build the event of one request."""
    from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

    publisher = ZmqEventPublisher(0, endpoint="inproc://kvbus-bench-handoff")

    def batch(hashes: tuple[int, ...]) -> Any:
        stored = BlockStored(
            block_hashes=list(hashes),
            parent_block_hash=None,
            token_ids=[],
            block_size=256,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        return KVEventBatch(ts=time.time(), events=[stored])

    return publisher, batch


if __name__ == "__main__":
    sys.exit(main())
