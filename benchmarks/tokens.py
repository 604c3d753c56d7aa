"""What commands cost a real vLLM 0.18 on the CPU: output tokens a second with none, and with 500 commands a second.

    .venv-e2e/bin/python -m benchmarks.tokens [--rounds 6] [--out out]

A tiny model, one rank, kvbus's connector in vLLM's one process; every command is an evict of 100 chunks that are
nowhere. Turns with and without commands alternate. The sender runs on the same machine and takes its share of it.
Writes out/tokens.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.bus import hashes
from kvbus.client import KVBus
from kvbus.embedded import EmbeddedServer
from kvbus.protocol import Evict
from kvbus.settings import load_settings

PER_SECOND = 500
PROMPTS, TOKENS = 8, 96


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    from tests.e2e.engine import Engine, Options
    from tests.e2e.prompts import prompt

    prompts = [prompt(seed, 200) for seed in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory) / "server") as server:
        home = Path(directory)
        model = home / "model"
        subprocess.run([sys.executable, "-m", "tests.e2e.model", str(model)], check=True, timeout=120)
        settings = load_settings({"redis_url": server.url, "namespace": "tokens"})
        with (
            Engine(Options(home / "vllm", model, url=server.url, namespace="tokens")) as engine,
            KVBus(settings) as bus,
        ):
            rates: dict[str, list[float]] = {"none": [], "commands": []}
            sent = [0]

            def turn() -> float:
                began = time.perf_counter()
                outputs = engine.call("generate", prompts=prompts, max_tokens=TOKENS)
                return float(sum(len(output["tokens"]) for output in outputs) / (time.perf_counter() - began))

            turn()
            for _ in range(args.rounds):
                rates["none"].append(turn())
                stop = threading.Event()
                sender = threading.Thread(target=_send, args=(bus, stop, sent), daemon=True)
                sender.start()
                began = time.perf_counter()
                rates["commands"].append(turn())
                taken = time.perf_counter() - began
                stop.set()
                sender.join()
            handle = bus.evict(hashes())
            answered = len(handle.wait(60).finals)
        rates["sent_per_second_last"] = [sent[0] / args.rounds / taken]
        rates["answered_after"] = [answered]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tokens.json").write_text(json.dumps(rates, indent=1) + "\n")
    print(json.dumps(rates))
    return 0


def _send(bus: KVBus, stop: threading.Event, sent: list[int]) -> None:
    """PER_SECOND commands, a tenth of them every tenth of a second."""
    batch = [Evict(chunk_hashes=hashes())] * (PER_SECOND // 10)
    due = time.perf_counter()
    while not stop.wait(max(0.0, due - time.perf_counter())):
        bus.send_all(batch)
        sent[0] += len(batch)
        due += 0.1


if __name__ == "__main__":
    sys.exit(main())
