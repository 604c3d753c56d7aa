"""Who may ask, how much they may send, how slow they may be, and what the log says of them."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvbus.errors import ConfigError
from kvbus.facade import server as http_server
from kvbus.facade.guard import access_log
from kvbus.facade.server import is_loopback, listen
from kvbus.settings import Settings
from tests.facade_kit import RunningFacade, Scene, scene
from tests.servers import Server, eventually

TOKEN = "correct-horse-battery"
EVICT = {"chunk_hashes": ["3f5c45ecbab5e9fd"]}
PROTECTED = ["/memory/workers", "/memory/commands/x", "/memory/prefetch/x", "/memory/events", "/metrics", "/nothing"]


@pytest.fixture
def here(valkey: Server, namespace: str) -> Iterator[Scene]:
    with scene(valkey.settings(namespace)) as made:
        yield made


def raw(facade: RunningFacade, *pieces: bytes) -> bytes:
    """All that the server says to these bytes, until it closes."""
    with socket.create_connection((facade.host, facade.port), timeout=20) as client:
        found = b""
        for piece in pieces:
            client.sendall(piece)
            if piece.endswith(b"\r\n\r\n") and piece is not pieces[-1]:
                found += client.recv(65_536)  # one request is answered before the next begins
        try:
            while data := client.recv(65_536):
                found += data
        except ConnectionResetError:
            pass
        return found


# -- the token ----------------------------------------------------------------------------------------------------


def test_without_the_token_nothing(here: Scene) -> None:
    facade = here.facade(rest_token=TOKEN)
    wrong = [TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", "Bearer ümlaut"]
    for path in PROTECTED:
        for headers in [{}, *({"authorization": text.encode("latin-1")} for text in wrong)]:
            answer = facade.http.get(path, headers=headers)
            assert answer.status_code == 401, (path, headers)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert TOKEN not in answer.text


def test_a_command_without_the_token_is_not_sent(here: Scene) -> None:
    here.worker()
    facade = here.facade(rest_token=TOKEN)
    for path in ("evict", "prefetch", "lookup"):
        assert facade.post(f"/memory/{path}", {**EVICT, "lookup_id": "x"}).status_code == 401
    assert here.commands() == 0


def test_with_the_token(here: Scene) -> None:
    here.worker()
    facade = here.facade(rest_token=TOKEN)
    answer = facade.post("/memory/evict", EVICT, headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/docs", "/openapi.json"])
def test_probes_and_the_document_need_none(here: Scene, path: str) -> None:
    assert here.facade(rest_token=TOKEN).http.get(path).status_code in (200, 503)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("example.org", False),
    ],
)
def test_what_only_this_machine_can_reach(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_it_listens_to_strangers_only_with_a_token_or_when_told_to() -> None:
    settings = Settings(rest_host="0.0.0.0", rest_port=0)
    with pytest.raises(ConfigError, match="no rest_token"):
        listen(settings)
    for values in ({"rest_token": TOKEN}, {"rest_insecure": True}):
        listen(msgspec.structs.replace(settings, **values)).close()


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen(Settings(rest_port=port))


def test_pages_of_other_sites_are_refused(here: Scene) -> None:
    here.worker()
    facade = here.facade()
    assert facade.post("/memory/evict", EVICT, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert here.commands() == 0
    assert facade.post("/memory/evict", EVICT, headers={"sec-fetch-site": "same-origin"}).status_code == 200


# -- behind a proxy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/kv"])
def test_behind_a_proxy_prefix_stripped_or_not(here: Scene, prefix: str) -> None:
    here.worker()
    facade = here.facade(rest_root_path="/kv", rest_token=TOKEN)
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert facade.post(f"{prefix}/memory/evict", EVICT, headers=headers).status_code == 200
    assert facade.post(f"{prefix}/memory/evict", EVICT).status_code == 401
    assert facade.http.get(f"{prefix}/healthz").status_code == 200
    assert facade.http.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/kv"}]


# -- bounds --------------------------------------------------------------------------------------------------------


def test_headers_are_bounded_by_bytes(here: Scene) -> None:
    facade = here.facade()
    endless = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * http_server.MAX_HEADER_BYTES
    assert b" 431 " in raw(facade, endless).split(b"\r\n")[0]


def test_headers_are_bounded_by_number(here: Scene) -> None:
    facade = here.facade()
    many = b"".join(b"x-%d: y\r\n" % number for number in range(http_server.MAX_HEADERS + 1))
    assert b" 431 " in raw(facade, b"GET /healthz HTTP/1.1\r\n" + many + b"\r\n").split(b"\r\n")[0]


def test_connections_are_bounded(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    facade = here.facade()
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 3)
    held = [socket.create_connection((facade.host, facade.port), timeout=20) for _ in range(3)]
    eventually(lambda: len(facade.server.server_state.connections) == 3, what="three connections")
    assert b" 503 " in raw(facade).split(b"\r\n")[0]
    for one in held:
        one.close()
    eventually(lambda: not facade.server.server_state.connections, what="the connections' end")
    assert facade.http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"GET /healthz HTT",),
        (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"),
        (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"GET"),
        (b"POST /memory/evict HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{",),
        (b"POST /memory/evict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n",),
    ],
    ids=["silent", "half a line", "blank lines", "half a second request", "half a body", "half a chunked body"],
)
def test_clients_that_stop_in_the_middle_are_let_go(
    here: Scene, monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.2)
    monkeypatch.setattr(http_server, "BODY_S", 0.2)
    facade = here.facade()
    raw(facade, *pieces)  # ends, because the server closes
    eventually(lambda: not facade.server.server_state.connections, what="the connection's end")


def test_a_client_that_does_not_read_is_let_go(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "WRITE_S", 0.2)
    facade = here.facade()
    bus = here.bus()
    event = {"type": "worker.stopped"}
    body = {"worker": "a/0", "instance": "a", "rank": 0, "epoch": 1, "reason": "x" * 1000}
    pipe = bus.client.pipeline(transaction=False)
    for _ in range(20_000):
        pipe.xadd(bus.keys.events, {**event, "json": json.dumps(body)})
    pipe.execute()
    with socket.create_connection((facade.host, facade.port), timeout=20) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.sendall(b"GET /memory/events?start=start HTTP/1.1\r\nhost: x\r\n\r\n")
        eventually(lambda: facade.server.server_state.connections, what="the connection")
        eventually(lambda: not facade.server.server_state.connections, what="the connection's end")
    eventually(lambda: _gauge(facade, "kvbus_facade_event_streams") == 0, what="the stream's end")


def _gauge(facade: RunningFacade, name: str) -> float:
    lines = facade.http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


# -- the log -------------------------------------------------------------------------------------------------------


def _access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == access_log.name]


def test_one_json_line_a_request(here: Scene, caplog: pytest.LogCaptureFixture) -> None:
    here.worker()
    facade = here.facade(rest_token=TOKEN)
    headers = {"authorization": f"Bearer {TOKEN}", "x-request-id": "from-the-caller"}
    with caplog.at_level(logging.INFO, access_log.name):
        facade.post("/memory/evict?secret=query", {**EVICT, "lookup_id": "a-private-label"}, headers=headers)
        facade.post("/memory/evict", {"chunk_hashes": ["nope"]}, headers=headers | {"x-request-id": "bad id"})
        facade.post("/memory/evict", EVICT, headers={"authorization": "Bearer a-wrong-secret"})
        # A line follows its answer: the client may be quicker.
        eventually(lambda: len(_access_lines(caplog)) == 3, what="a line for each request")
    lines = _access_lines(caplog)
    assert [line["status"] for line in lines] == [200, 400, 401]
    good = lines[0]
    assert (good["id"], good["method"], good["path"]) == ("from-the-caller", "POST", "/memory/evict")
    assert good["counts"] == {"chunks": 1, "evicted": 1}
    assert len(good["command_id"]) == 32
    assert good["ms"] > 0
    assert lines[1]["id"] != "bad id"
    for told in ("secret", TOKEN, "private", "3f5c45ecbab5e9fd"):
        assert told not in caplog.text
