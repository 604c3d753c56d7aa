"""deploy/users.acl.in on real servers: each role can do its whole job, and is refused the others'."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from kvbus.client import KVBus
from kvbus.memory import MemoryService
from kvbus.ops.lag import read_lag
from kvbus.protocol.results import Status
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.registry import load_reader, read_publishers, read_stats, write_stats
from publisher import FinishedRequest, Publisher
from tests.conftest import MakeServer
from tests.facade_kit import QUICK, Scene, result, scene
from tests.servers import RealServer, eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
ROLES = ("admin", "publisher", "worker", "engine", "memory", "facade", "observer")
NAMESPACE = "cell-7"
P = f"kvbus:{{{NAMESPACE}}}:"


class Guarded:
    """A server where every role has a user of its own, and nobody else gets in."""

    def __init__(self, server: RealServer) -> None:
        self.server = server

    def settings(self, role: str, **values: Any) -> Settings:
        url = f"redis://{role}:secret-{role}@127.0.0.1:{self.server.port}/0"
        return Settings(redis_url=url, namespace=NAMESPACE, **QUICK, **values)

    def client(self, role: str) -> redis.Redis:
        return self.server.client(username=role, password=f"secret-{role}")

    def refused(self) -> list[str]:
        """What the server has refused to anyone: user, command or key. Clients ask for client|setinfo in vain."""
        entries: Any = self.client("admin").execute_command("ACL", "LOG")
        found = [_pairs(entry) for entry in entries]
        return [
            f"{entry['username']}: {entry['reason']} {entry['object']}"
            for entry in found
            if entry["object"] != "client|setinfo"
        ]


def _pairs(entry: Any) -> dict[str, str]:
    flat = [part for item in entry.items() for part in item] if isinstance(entry, dict) else entry
    return {_text(name): _text(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def render(**changes: str) -> subprocess.CompletedProcess[str]:
    passwords = {f"{role.upper()}_PASSWORD": f"secret-{role}" for role in ROLES}
    env = {"PATH": "/usr/bin:/bin", "NAMESPACE": NAMESPACE, **passwords, **changes}
    return subprocess.run(["sh", str(DEPLOY / "render-acl.sh")], env=env, capture_output=True, text=True, timeout=20)


@pytest.fixture(params=["valkey", "redis7"])
def guarded(request: pytest.FixtureRequest, start_server: MakeServer, tmp_path: Path) -> Guarded:
    path = tmp_path / "users.acl"
    path.write_text("user default on nopass ~* &* +@all\n")
    server = start_server(request.param, aclfile=str(path))
    assert isinstance(server, RealServer)
    done = render()
    assert done.returncode == 0, done.stderr
    path.write_text(done.stdout)
    assert server.client().execute_command("ACL", "LOAD")
    return Guarded(server)


@pytest.fixture
def here(guarded: Guarded) -> Iterator[Scene]:
    """Workers under their own user."""
    with scene(guarded.settings("worker")) as made:
        yield made


def finished(number: int) -> FinishedRequest:
    return FinishedRequest(
        request_id=f"r{number}",
        instance="llm",
        reason="stop",
        chunk_hashes=(1, 2, 3),
        context={"session": "s1", "intent": "i1"},
    )


def test_every_role_does_its_whole_job(guarded: Guarded, here: Scene) -> None:
    deferred_first = here.worker(
        "llm/0",
        lambda task: [result(task, Status.DEFERRED, in_use=1), result(task, evicted_pairs=2)],
        hash_fingerprint="x",
    )
    here.worker("llm/1")
    write_stats(here.bus(), "llm/1", {"fine": 1})

    with Publisher(guarded.settings("publisher"), name="llm/scheduler", instance="llm", hash_fingerprint="x") as told:
        for number in range(3):
            assert told.publish(finished(number))
        facade = here.facade(redis_url=guarded.settings("facade").redis_url)
        _memory_works(guarded)
        # what nobody can decode becomes a dead letter, by a worker's hand
        guarded.client("memory").xadd(f"{P}commands", {"type": "nonsense", "body": b"\xff"})
        body = {"chunk_hashes": ["1"], "lookup_id": "x"}
        evicted = facade.post("/memory/evict", body).json()
        assert evicted["status"] == "success", evicted
        assert facade.post("/memory/prefetch?wait=20", body).json()["complete"]
        assert facade.post("/memory/lookup", body).status_code == 200
        assert facade.http.get("/memory/sessions").json()["total"] == 1
        assert facade.http.post("/memory/sessions/s1/switch").status_code == 200
        assert facade.post("/memory/requests", {"request_id": "soon", "session": "s2"}).status_code == 200
        assert facade.http.delete("/memory/sessions/s1").status_code == 200
        assert facade.http.get(f"/memory/commands/{evicted['command_id']}").json()["complete"]
        assert facade.http.get("/memory/prefetch/x").status_code == 200
        assert "request.finished" in facade.http.get("/memory/events?start=start&seconds=0.3").text
        eventually(lambda: facade.http.get("/readyz").json()["ready"], what="readiness")
        metrics = facade.http.get("/metrics").text
        assert 'kvbus_worker_fine{instance="llm",rank="1",worker="llm/1"} 1.0' in metrics
        eventually(lambda: _observer_sees_all(guarded), what="the observer sees what is there")
    assert told.close()
    assert deferred_first.seen
    deferred_first.stop()  # gives its name back
    assert guarded.refused() == []


def test_vllm_in_both_roles_with_one_user(guarded: Guarded) -> None:
    with (
        scene(guarded.settings("engine")) as here,
        Publisher(guarded.settings("engine"), name="llm/scheduler", instance="llm") as told,
        KVBus(guarded.settings("memory")) as bus,
        bus.events(start="start") as events,
    ):
        worker = here.worker("llm/0")
        write_stats(here.bus(), "llm/0", {"fine": 1})
        told.publish(finished(0))
        assert bus.evict(["1"]).wait(20).complete
        seen: set[str] = set()
        while not seen >= {"request.finished", "worker.started"}:
            seen |= {delivery.event.TYPE for delivery in events.read(block_ms=200)}
        worker.stop()
    assert guarded.refused() == []


def _memory_works(guarded: Guarded) -> None:
    with KVBus(guarded.settings("memory"), issuer="memory") as bus:
        assert bus.evict(["1"]).wait(20).complete
        with bus.events(reader="agent", start="start") as events:
            assert next(iter(events))
            events.save()
        assert load_reader(bus.bus, "agent") is not None
    service_bus = Bus(guarded.settings("memory"))
    with MemoryService(service_bus, name="memory-1", start="start") as service:
        eventually(
            lambda: service.counters.get("events") or service.ledger.totals().sessions, what="the ledger follows"
        )
    service_bus.close()


def _observer_sees_all(guarded: Guarded) -> bool:
    bus = Bus(guarded.settings("observer"))
    try:
        client = KVBus(bus=bus)
        names = [member.name for member in client.workers()]
        streams = {name: client.log.state(key).length for name, key in bus.keys.streams.items()}
        assert set(read_publishers(bus)) == {"llm/scheduler"}
        read_lag(bus)
        with client.events(start="start") as events:
            assert list(events.read(block_ms=10))
        return (
            {"llm/0", "llm/1"} <= set(names)
            and all(streams[name] for name in ("events", "commands", "results", "dead"))
            and bool(read_stats(bus, ["llm/1"]))
        )
    finally:
        bus.close()


Attempt = tuple[str | int, ...]
SET_KEYS = ("workers", "publishers", "worker:llm/0", "reader:agent", "memory:position")
REFUSED_INSIDE = ("permission", "acl failure", "can't run this command", "can't access at least one of the keys")
ATTEMPTS: dict[str, Attempt] = {
    "write an event": ("XADD", f"{P}events", "*", "type", "x"),
    "write a command": ("XADD", f"{P}commands", "*", "type", "x"),
    "write a result": ("XADD", f"{P}results", "*", "type", "x"),
    "write a dead letter": ("XADD", f"{P}dead", "*", "type", "x"),
    **{f"change {key}": ("HSET", f"{P}{key}", "x", "1") for key in SET_KEYS},
    "a worker's heartbeat": ("SET", f"{P}live:llm/0", "me"),
    "a publisher's heartbeat": ("SET", f"{P}live:llm/scheduler", "me"),
    "a worker's counters": ("SET", f"{P}stats:llm/0", "{}"),
    "forget a worker": ("HDEL", f"{P}workers", "llm/9"),
    "trim commands": ("XTRIM", f"{P}commands", "MAXLEN", 0),
    "delete an event": ("XDEL", f"{P}events", "1-1"),
    "delete a stream": ("DEL", f"{P}results"),
    "unlink a stream": ("UNLINK", f"{P}commands"),
    "rename a stream": ("RENAME", f"{P}events", f"{P}old"),
    "expire a stream": ("PEXPIRE", f"{P}events", 1),
    "push ids ahead": ("XSETID", f"{P}commands", "9999999999999-0"),
    "read another cell": ("XRANGE", "kvbus:{other}:commands", "-", "+"),
    "write another cell": ("XADD", "kvbus:{other}:commands", "*", "type", "x"),
    "write by script": ("EVAL", "return redis.call('DEL', KEYS[1])", 1, f"{P}commands"),
    "write by script, unnamed": ("EVAL", f"return redis.call('XTRIM', '{P}commands', 'MAXLEN', 0)", 0),
    "empty the server": ("FLUSHALL",),
    "change its settings": ("CONFIG", "SET", "maxmemory", "1"),
    "read its settings": ("CONFIG", "GET", "*"),
    "stop it": ("SHUTDOWN", "NOSAVE"),
    "change users": ("ACL", "SETUSER", "x", "on"),
    "see all keys": ("KEYS", "*"),
    "stop others": ("CLIENT", "KILL", "TYPE", "normal"),
    "watch others": ("MONITOR",),
    "make it a replica": ("REPLICAOF", "127.0.0.1", "1"),
}
MAY: dict[str, set[str]] = {
    "publisher": {"write an event", "change publishers", "a publisher's heartbeat"},
    "worker": {
        *("write an event", "write a result", "write a dead letter", "change workers", "change worker:llm/0"),
        *("a worker's heartbeat", "a worker's counters", "forget a worker"),
    },
    "memory": {"write a command", "write a dead letter", "change reader:agent", "change memory:position"},
    "facade": {"write a command", "change memory:position"},
    "observer": set(),
}
MAY["engine"] = MAY["publisher"] | MAY["worker"]
MAY["memory"].add("a worker's counters")  # its own counters stand beside them, under a name that it chooses


@pytest.mark.parametrize("role", [role for role in ROLES if role != "admin"])
def test_each_role_is_refused_the_others_jobs(guarded: Guarded, role: str) -> None:
    client = guarded.client(role)
    allowed = set()
    for what, attempt in ATTEMPTS.items():
        try:
            client.execute_command(*attempt)
        except redis.exceptions.NoPermissionError:
            continue
        except redis.ResponseError as error:
            # A script is run, and what it calls is refused inside it.
            if any(told in str(error).lower() for told in REFUSED_INSIDE):
                continue
        allowed.add(what)
    assert allowed == MAY[role]


def test_nobody_gets_in_without_a_name(guarded: Guarded) -> None:
    with pytest.raises(redis.AuthenticationError):
        guarded.server.client(retry=None).ping()
    with pytest.raises(redis.AuthenticationError):
        guarded.server.client(username="worker", password="secret-facade", retry=None).ping()


def test_a_wrong_password_is_told(guarded: Guarded) -> None:
    settings = msgspec.structs.replace(
        guarded.settings("facade"), redis_url=f"redis://facade:wrong@127.0.0.1:{guarded.server.port}/0"
    )
    with scene(settings) as here:
        answer = here.facade().post("/memory/evict", {"chunk_hashes": ["1"]})
    assert answer.status_code == 503
    assert answer.json()["code"] == "bus_refused"
    assert "wrong" not in answer.text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"WORKER_PASSWORD": ""}, "WORKER_PASSWORD is not set"),
        ({"WORKER_PASSWORD": "a b"}, "WORKER_PASSWORD may hold"),
        ({"NAMESPACE": "x;y"}, "NAMESPACE may hold"),
        ({"ADMIN_PASSWORD": "p/|&$(id)"}, "ADMIN_PASSWORD may hold"),
    ],
)
def test_what_would_break_the_file_is_refused(changes: dict[str, str], told: str) -> None:
    done = render(**changes)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stdout == ""
