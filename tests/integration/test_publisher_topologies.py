"""The publisher behind Sentinel, on a Redis Cluster and over a Unix socket."""

from __future__ import annotations

from pathlib import Path

from kvbus.settings import Settings
from tests.conftest import MakeServer
from tests.integration.test_publisher_faults import QUICK, Seen, finished, names, running, sent
from tests.servers import RealServer, cluster, replica_of, sentinels


def test_sentinel_failover_with_the_master_killed(start_server: MakeServer, namespace: str, tmp_path: Path) -> None:
    master = start_server("valkey")
    assert isinstance(master, RealServer)
    with (
        replica_of(master, tmp_path / "replica") as replica,
        sentinels(master, tmp_path / "sentinels") as ports,
    ):
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        settings = Settings(redis_url=f"redis+sentinel://{hosts}/mymaster/0", namespace=namespace, **QUICK)
        with running(settings) as publisher:
            for number in range(50):
                publisher.publish(finished(number))
            sent(publisher, 50)
            assert master.client().wait(1, 5_000) == 1
            master.kill()
            for number in range(50, 200):
                publisher.publish(finished(number))
            sent(publisher, 200)
            assert publisher.close()
        seen = Seen(replica, namespace)
    assert (seen.delivered, seen.missing) == (names(0, 200), 0)


def test_a_cluster(namespace: str, tmp_path: Path) -> None:
    with cluster("valkey", tmp_path) as nodes:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        settings = Settings(redis_url=f"redis+cluster://{hosts}", namespace=namespace)
        with running(settings) as publisher:
            for number in range(300):
                publisher.publish(finished(number))
            sent(publisher, 300)
            assert publisher.close()
            assert publisher.counters.get("retries") == 0
        key = f"kvbus:{{{namespace}}}:events"
        slot = nodes[0].client().execute_command("CLUSTER", "KEYSLOT", key)
        owner = nodes[min(slot // (16_384 // 3), 2)]
        seen = Seen(owner, namespace)
    assert (seen.delivered, seen.missing) == (names(0, 300), 0)


def test_a_unix_socket(start_server: MakeServer, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start_server("redis7", unixsocket=str(path))
    with running(Settings(redis_url=f"unix://{path}", namespace=namespace)) as publisher:
        for number in range(100):
            publisher.publish(finished(number))
        assert publisher.close()
    assert Seen(server, namespace).delivered == names(0, 100)
