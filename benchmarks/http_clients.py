"""HTTP clients of the benchmarks: keep-alive connections, one thread each, as many requests as fit a given time."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from typing import Any


class Caller:
    """One keep-alive connection that posts evicts."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        """The answer's JSON. Raises RuntimeError unless it is a 200."""
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = self._connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"POST {path}: {reply.status} {content[:300]!r}")
        found: dict[str, Any] = json.loads(content)
        return found

    def close(self) -> None:
        self._connection.close()


def evict_body(hashes: Sequence[int], **more: Any) -> bytes:
    return json.dumps({"chunk_hashes": [f"{value:x}" for value in hashes]} | more).encode()


def rate(port: int, body: bytes, *, clients: int, seconds: float) -> float:
    """Requests a second that `clients` threads get answered, each sending the next when the last was answered."""
    done = [0] * clients
    failed: list[BaseException] = []
    start = threading.Barrier(clients + 1)
    end_at = [0.0]

    def work(place: int) -> None:
        caller = Caller(port)
        try:
            caller.post("/memory/evict", body)
            start.wait()
            while time.perf_counter() < end_at[0]:
                caller.post("/memory/evict", body)
                done[place] += 1
        except BaseException as error:  # noqa: BLE001 - told by the thread that measures
            failed.append(error)
            start.abort()
        finally:
            caller.close()

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(clients)]
    end_at[0] = time.perf_counter() + 3600
    for thread in threads:
        thread.start()
    try:
        start.wait(60)
    except threading.BrokenBarrierError:
        raise RuntimeError(f"a client failed: {failed[:1]}") from None
    began = time.perf_counter()
    end_at[0] = began + seconds
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    if failed:
        raise RuntimeError(f"a client failed: {failed[0]}") from failed[0]
    return sum(done) / taken
