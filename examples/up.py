"""The demo's system, up until Ctrl-C: a real Valkey, four LMCache workers, the facade; and the lines to try on it.

python -m examples.up
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

from examples.system import System
from kvbus.protocol import parse_hash
from kvbus.streams.keys import Keys
from publisher import FinishedRequest, Publisher

CHUNK = 64
TOKENS = list(range(1_000, 1_000 + 4 * CHUNK))


def main() -> int:
    """Run until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m examples.up", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--redis-port", type=int, default=6380, help="0 takes a free one")
    parser.add_argument("--port", type=int, default=6999, help="of the facade; 0 takes a free one")
    args = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    print(f"starting a Valkey server, {args.ranks} LMCache workers and the facade ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="kvbus-up-") as data:
        system = System(Path(data), ranks=args.ranks, redis_port=args.redis_port, facade_port=args.port)
        with system:
            hashes = system.store(TOKENS, seed=1)
            settings = system.settings()
            with Publisher(settings, name="llm-a/scheduler", instance="llm-a", model="kvbus-demo") as publisher:
                publisher.publish(
                    FinishedRequest(
                        request_id="chatcmpl-1",
                        instance="llm-a",
                        model="kvbus-demo",
                        reason="stop",
                        chunk_hashes=None,
                        hashes_later=lambda: [parse_hash(text) for text in hashes],
                        chunk_size=CHUNK,
                        prompt_tokens=len(TOKENS),
                        context={"session": "s1"},
                    )
                )
                print(_lines(system, hashes), flush=True)
                stop.wait()
        print("stopped", file=sys.stderr)
    return 0


def _lines(system: System, hashes: list[str]) -> str:
    keys = Keys(system.namespace)
    chosen = ",".join(f'"{text}"' for text in hashes)
    url, port = system.facade_url, system.server.port
    header = '-H "Content-Type: application/json"'
    cli = f"{'redis-cli' if shutil.which('redis-cli') else 'valkey-cli'} -p {port}"
    return f"""
Up. One text of {len(TOKENS)} tokens is stored on every rank, and announced. Ctrl-C stops all of it.

The REST facade:
  curl -s -X POST {url}/memory/evict {header} \\
    -d '{{"chunk_hashes": [{chosen}], "locations": ["LocalCPUBackend"]}}'
  curl -s -X POST {url}/memory/prefetch {header} \\
    -d '{{"chunk_hashes": [{chosen}], "lookup_id": "my_prefetch_001"}}'
  curl -s -X POST {url}/memory/lookup {header} -d '{{"chunk_hashes": [{chosen}]}}'
  curl -s {url}/memory/prefetch/my_prefetch_001

The streams, by hand:
  {cli} XADD '{keys.commands}' '*' type evict json '{{"chunk_hashes":[{chosen}],"locations":["LocalCPUBackend"]}}'
  {cli} XADD '{keys.commands}' '*' v 1 type ping id ping-1 body "$(printf '\\x80')"
  {cli} XREVRANGE '{keys.results}' + - COUNT 4
  {cli} XRANGE '{keys.events}' - + COUNT 10

The command line:
  export KVBUS_REDIS_URL={system.server.url}
  .venv/bin/kvbus workers
  .venv/bin/kvbus send prefetch --wait -- {" ".join(hashes)}
  .venv/bin/kvbus tail all
"""


if __name__ == "__main__":
    sys.exit(main())
