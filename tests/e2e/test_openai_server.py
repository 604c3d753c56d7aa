"""Scenario 6: vLLM's own OpenAI server and plain HTTP clients; then the REST facade with what the event said."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from kvbus.embedded import _free_port
from kvbus.protocol import DDR, SSD, Lookup, RequestFinished, format_hash
from tests.e2e.bus import BusView, hashes_of
from tests.e2e.conftest import MakeOptions
from tests.e2e.engine import ROOT, START_S, Options, VllmProcess
from tests.e2e.model import words
from tests.e2e.prompts import prompt
from tests.servers import RealServer, eventually

HTTP_S = 60


class Server(VllmProcess):
    """vLLM's OpenAI server, on a free port. more: options of its command line."""

    def __init__(self, options: Options, *more: str) -> None:
        self.port = _free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"]
        command += ["--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "2048"]
        command += ["--kv-transfer-config", json.dumps(options.transfer_config())]
        super().__init__(options, [*command, *more])

    def wait_ready(self) -> None:
        def ready() -> bool:
            if self.process.poll() is not None:
                self.fail("the server has ended")
            try:
                with self.connect() as answer:
                    return answer.status == 200
            except OSError:
                return False

        eventually(ready, within_s=START_S, what="the server's /health")

    def connect(self, path: str = "/health", body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """The answer, its body unread. Closing it hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HTTP_S)
        method = "GET" if body is None else "POST"
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def chat(self, text: str, **more: Any) -> dict[str, Any]:
        with self.connect("/v1/chat/completions", question(text, **more)) as answer:
            content = answer.read()
        assert answer.status == 200, content
        found: dict[str, Any] = json.loads(content)
        return found

    def stream(self, text: str, **more: Any) -> Iterator[dict[str, Any]]:
        """The parts of a streaming answer as they come; leaving the loop hangs up."""
        with self.connect("/v1/chat/completions", question(text, stream=True, **more)) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])


def question(text: str, **more: Any) -> dict[str, Any]:
    settings = {"model": "tiny", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return {**settings, "messages": [{"role": "user", "content": text}], **more}


def words_of(seed: int, length: int = 300) -> str:
    """A text of `length` words, each one token."""
    vocabulary = words()
    return " ".join(vocabulary[token] for token in prompt(seed, length))


def test_data_parallel_ranks_are_instances_of_their_own(make_options: MakeOptions, bus_server: RealServer) -> None:
    """Each has a scheduler, workers and a cache of its own; ranks of a dense model are not told how many they are."""
    bus = BusView(bus_server, f"e2e-{uuid.uuid4().hex[:12]}")
    with Server(make_options(bus.namespace), "--data-parallel-size", "2") as server:
        server.wait_ready()
        bus.wait_for_workers("e2e-dp0/0", "e2e-dp1/0")
        for seed in range(4):
            server.chat(words_of(seed))
        bus.wait_for(lambda: len(bus.events()) == 4, "the events")
        assert {(event.instance, event.publisher) for event in bus.events()} == {
            ("e2e-dp0", "e2e-dp0/scheduler"),
            ("e2e-dp1", "e2e-dp1/scheduler"),
        }
        # A command reaches both; each tells of its own cache.
        event = bus.events()[0]
        answers = bus.run(Lookup(chunk_hashes=event.chunk_hashes), "e2e-dp0/0", "e2e-dp1/0")
        resident = {worker.split("/")[0]: answer.counts.resident for worker, answer in answers.items()}
        other = ({"e2e-dp0", "e2e-dp1"} - {event.instance}).pop()
        assert resident == {event.instance: len(event.chunk_hashes), other: 0}


@pytest.fixture(scope="module")
def bus(bus_server: RealServer) -> BusView:
    return BusView(bus_server, f"e2e-{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="module")
def server(make_options: MakeOptions, bus: BusView) -> Iterator[Server]:
    with Server(make_options(bus.namespace)) as server:
        server.wait_ready()
        bus.wait_for_workers("e2e/0")
        yield server


def events_of(bus: BusView, external_id: str, count: int) -> list[RequestFinished]:
    def found() -> list[RequestFinished]:
        events = [event for event in bus.events() if event.external_id == external_id]
        return events if len(events) == count else []

    return bus.wait_for(found, f"{count} events of {external_id}")  # type: ignore[no-any-return]


def test_streaming_answers_carry_no_hashes_and_the_event_does(server: Server, bus: BusView) -> None:
    context = {"session": "s1", "intent": {"next": "plan", "steps": [1, 2]}}
    parts = list(server.stream(words_of(1), kv_transfer_params={"kvbus": context}))
    assert len(parts) > 2  # vLLM joins tokens into one part when its client is slow
    assert not any("chunk_hashes" in json.dumps(part) for part in parts)

    event = bus.finished(parts[0]["id"])
    assert event.context == context
    assert event.reason == "length"
    assert event.prompt_tokens == 302  # the words between "user" and "assistant"
    assert len(event.chunk_hashes) == 302 // 64

    whole = server.chat(words_of(1))
    assert hashes_of(whole["kv_transfer_params"]["chunk_hashes"]) == event.chunk_hashes
    assert bus.finished(whole["id"]).cached_tokens == 302 // 64 * 64


def test_a_stop_string_is_an_abort_to_the_scheduler(server: Server, bus: BusView) -> None:
    """And so in the event, as vLLM's scheduler knows no better; its hashes are there all the same."""
    greedy = server.chat(words_of(2))["choices"][0]["message"]["content"].split()
    answer = server.chat(words_of(2), stop=[greedy[4]], max_tokens=200)
    assert answer["choices"][0]["finish_reason"] == "stop"
    event = bus.finished(answer["id"])
    assert event.reason == "abort"
    assert len(event.chunk_hashes) == 302 // 64
    assert "chunk_hashes" not in (answer["kv_transfer_params"] or {})


def test_two_choices_are_two_events_of_one_request(server: Server, bus: BusView) -> None:
    answer = server.chat(words_of(3), n=2, temperature=1, seed=7)
    assert len(answer["choices"]) == 2
    events = events_of(bus, answer["id"], 2)
    assert events[0].request_id != events[1].request_id
    assert events[0].chunk_hashes == events[1].chunk_hashes != ()


def test_tags_of_a_request_are_in_its_event_and_find_its_chunks(server: Server, bus: BusView) -> None:
    answer = server.chat(words_of(7), kv_transfer_params={"lmcache.tag.user": "u1", "lmcache.tag.app": "a"})
    event = bus.finished(answer["id"])
    assert event.tags == (("user", "u1"), ("app", "a"))
    chunks = len(event.chunk_hashes)
    tagged = bus.run(Lookup(chunk_hashes=event.chunk_hashes, tags=event.tags), "e2e/0")["e2e/0"]
    plain = bus.run(Lookup(chunk_hashes=event.chunk_hashes), "e2e/0")["e2e/0"]
    assert (tagged.counts.resident, plain.counts.missing) == (chunks, chunks)


def test_a_client_that_hangs_up(server: Server, bus: BusView) -> None:
    stream = server.stream(words_of(4), max_tokens=1500, kv_transfer_params={"kvbus": {"session": "gone"}})
    request_id = next(stream)["id"]
    next(stream)
    stream.close()
    event = bus.finished(request_id)
    assert event.reason == "abort"
    assert event.output_tokens < 1500
    assert event.context == {"session": "gone"}


@pytest.mark.parametrize(
    "context",
    ["text", ["list"], {"too": "long " * 2_000}, json.loads('{"a":' * 12 + "1" + "}" * 12)],
    ids=["text", "list", "large", "deep"],
)
def test_a_context_that_cannot_go_is_left_out_and_the_event_goes(server: Server, bus: BusView, context: Any) -> None:
    answer = server.chat(words_of(5), max_tokens=2, kv_transfer_params={"kvbus": context})
    event = bus.finished(answer["id"])
    assert event.context == {}
    assert len(event.chunk_hashes) == 302 // 64


def test_a_request_id_longer_than_a_message_may_carry(server: Server, bus: BusView) -> None:
    before = len(bus.events())
    answer = server.chat(words_of(6), max_tokens=2, request_id="x" * 3_000)
    assert len(answer["id"]) > 3_000
    bus.wait_for(lambda: len(bus.events()) == before + 1, "the event")
    event = bus.events()[-1]
    assert "xxx" in event.request_id
    assert len(event.chunk_hashes) == 302 // 64


@pytest.fixture
def facade(bus: BusView, bus_server: RealServer, server: Server) -> Iterator[str]:
    """The URL of a facade process for the same bus."""
    port = _free_port()
    env = server.options.environment()
    env.pop("LD_PRELOAD")
    log = server.options.directory / "facade.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvbus.cli.main", "serve", "--port", str(port)],
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=out,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: curl(f"{url}/readyz", check=False), within_s=60, what=f"the facade ({log})")
        yield url
    finally:
        process.terminate()
        process.wait(20)


def curl(url: str, body: Any = None, *, check: bool = True) -> Any:
    """The JSON answer of curl, used as an operator would; None without success."""
    command = ["curl", "-sf", "--max-time", "20", url]
    if body is not None:
        command += ["-X", "POST", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if check:
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout) if done.returncode == 0 else None


def test_the_two_curl_lines_with_the_hashes_of_a_request(server: Server, bus: BusView, facade: str) -> None:
    first = server.chat(words_of(8))
    event = bus.finished(first["id"])
    hashes = [format_hash(found) for found in event.chunk_hashes]
    bus.wait_for(lambda: tiers(bus, event) == [(DDR, SSD)] * len(hashes), "the files of the text")

    evicted = curl(f"{facade}/memory/evict", {"chunk_hashes": hashes, "locations": [DDR]})
    assert (evicted["status"], evicted["num_evicted"]) == ("success", len(hashes))
    assert tiers(bus, event) == [(SSD,)] * len(hashes)

    started = curl(f"{facade}/memory/prefetch", {"chunk_hashes": hashes[::-1], "lookup_id": "turn_prefetch"})
    assert started["status"] == "prefetch_started"
    assert (started["lookup_id"], started["num_chunks"]) == ("turn_prefetch", len(hashes))
    bus.wait_for(lambda: tiers(bus, event) == [(DDR, SSD)] * len(hashes), "the prefetch")

    again = server.chat(words_of(8))
    assert again["choices"] == first["choices"]
    assert bus.finished(again["id"]).cached_tokens == len(hashes) * 64


def tiers(bus: BusView, event: RequestFinished) -> list[tuple[str, ...]]:
    held = bus.run(Lookup(chunk_hashes=event.chunk_hashes), "e2e/0")["e2e/0"].held
    assert held is not None
    return [tuple(sorted(held.tiers_of(place))) for place in range(len(event.chunk_hashes))]
