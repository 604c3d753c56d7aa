"""Requests that are aborted at random moments, inside one process, and what they leave behind.

Runs in the host process, with vLLM's engine core in it too (VLLM_ENABLE_V1_MULTIPROCESSING=0): so a step is a step,
and what is kept of a request can be counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

SETTLE_STEPS = 20
MAX_ALIVE = 10
"""More than the blocks hold: some always wait."""


def storm(llm: Any, make_prompt: Callable[[int, int], list[int]], seed: int, count: int) -> dict[str, Any]:
    """Run `count` requests and abort about half: before their first step, while they wait, while they run.

    Returns {"aborted": ids, "ended": id -> reason, "preemptions": how often a request lost its blocks}.
    """
    from vllm import SamplingParams

    rng = random.Random(seed)
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    alive: set[str] = set()
    aborted: list[str] = []
    ended: dict[str, str] = {}
    preemptions: dict[str, int] = {}
    added = 0

    def abort(request_id: str) -> None:
        engine.abort_request([request_id])
        alive.discard(request_id)
        aborted.append(request_id)

    while added < count or alive:
        for _ in range(rng.randint(0, 3) if added < count and len(alive) < MAX_ALIVE else 0):
            request_id = f"storm-{seed}-{added}"
            added += 1
            # Few texts, so that many requests find chunks to pin; a length of its own, so that they are not all alike.
            text = make_prompt(rng.randint(0, 5), rng.randint(40, 400))
            sampling = SamplingParams(temperature=0, max_tokens=rng.randint(1, 60), detokenize=False, ignore_eos=True)
            engine.add_request(request_id, {"prompt_token_ids": text}, sampling)
            alive.add(request_id)
            if rng.random() < 0.1:
                abort(request_id)
        for output in engine.step():
            if output.finished:
                alive.discard(output.request_id)
                ended[output.request_id] = output.outputs[0].finish_reason
        for request in scheduler.requests.values():
            if request.num_preemptions:
                preemptions[request.request_id] = request.num_preemptions
        for request_id in sorted(alive):
            if rng.random() < 0.012:
                abort(request_id)
    settle(llm)
    return {"aborted": aborted, "ended": ended, "preemptions": sum(preemptions.values())}


def settle(llm: Any) -> None:
    """Steps with no request, as vLLM's own loop makes them until the workers have heard of every end."""
    for _ in range(SETTLE_STEPS):
        llm.llm_engine.engine_core.get_output()


def kept(llm: Any) -> dict[str, int]:
    """How much every map, list and set holds that could grow with requests, and all pins. By dotted name."""
    from lmcache.v1.pin_monitor import PinMonitor
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler_side = llm.llm_engine.engine_core.engine_core.scheduler.connector
    worker_side = get_kv_transfer_group()
    client = scheduler_side._lmcache_engine.lookup_client
    while hasattr(client, "actual_lookup_client"):
        client = client.actual_lookup_client
    engine = worker_side._lmcache_engine.lmcache_engine
    backends = engine.storage_manager.storage_backends
    things = {
        "scheduler": scheduler_side._lmcache_engine,
        "worker": worker_side._lmcache_engine,
        "client": client,
        "tap": scheduler_side._kvbus_scheduler.tap,
        "engine": engine,
        "manager": engine.storage_manager,
        "pin_monitor": PinMonitor.GetOrCreate(),
    }
    sizes = {
        f"{name}.{attribute}": len(value)
        for name, thing in things.items()
        for attribute, value in vars(thing).items()
        if isinstance(value, dict | list | set)
    }
    for kind, by_status in engine.event_manager.events.items():
        sizes |= {f"events.{kind.name}.{status.name}": len(events) for status, events in by_status.items()}
    sizes["pins.cpu"] = sum(found.meta.pin_count for found in backends["LocalCPUBackend"].hot_cache.values())
    sizes["refs.cpu"] = sum(found.meta.ref_count - 1 for found in backends["LocalCPUBackend"].hot_cache.values())
    sizes["pins.disk"] = sum(found.pin_count for found in backends["LocalDiskBackend"].dict.values())
    return sizes
