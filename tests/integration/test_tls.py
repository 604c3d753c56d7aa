"""TLS to Redis, with Debian's server and a certificate made here: everybody works over it, nobody trusts a stranger."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbus.client import KVBus
from kvbus.errors import BusUnavailable
from kvbus.settings import Settings
from publisher import FinishedRequest, Publisher
from tests.conftest import MakeServer
from tests.facade_kit import scene
from tests.servers import eventually, tls_options


@pytest.fixture
def tls_url(start_server: MakeServer, tmp_path: Path) -> tuple[str, Path]:
    """The address of a server that speaks TLS, and the certificate of its authority."""
    options, authority = tls_options(tmp_path / "tls")
    start_server("redis7", **options)
    return f"rediss://localhost:{options['tls-port']}/0", authority


def test_facade_worker_publisher_and_client_over_tls(tls_url: tuple[str, Path], namespace: str) -> None:
    url, authority = tls_url
    settings = Settings(redis_url=f"{url}?ssl_ca_certs={authority}", namespace=namespace, block_ms=200)
    with scene(settings) as here:
        here.worker("a/0")
        facade = here.facade()
        answer = facade.post("/memory/evict", {"chunk_hashes": ["1", "2"]})
        assert (answer.status_code, answer.json()["num_evicted"]) == (200, 2)
        with (
            KVBus(settings) as bus,
            bus.events() as events,
            Publisher(settings, name="a/scheduler", instance="a") as told,
        ):
            assert bus.ping().wait(20).complete
            told.publish(FinishedRequest(request_id="r", instance="a", reason="stop", chunk_hashes=(1,)))
            delivery = eventually(lambda: next(events.read(block_ms=200), None), what="the event")
            assert delivery.event.request_id == "r"
        assert facade.http.get("/readyz").status_code == 200


def test_a_certificate_of_a_stranger_is_not_trusted(tls_url: tuple[str, Path], namespace: str, tmp_path: Path) -> None:
    url, _ = tls_url
    _, stranger = tls_options(tmp_path / "stranger")
    settings = Settings(redis_url=f"{url}?ssl_ca_certs={stranger}", namespace=namespace)
    with KVBus(settings) as bus, pytest.raises(BusUnavailable, match="certificate verify failed"):
        bus.workers()
    with scene(settings) as here:
        answer = here.facade().post("/memory/evict", {"chunk_hashes": ["1"]})
    assert answer.status_code == 503
    assert "certificate verify failed" in answer.json()["error"]


def test_plain_text_to_the_tls_port_fails_and_says_so(tls_url: tuple[str, Path], namespace: str) -> None:
    url, _ = tls_url
    with (
        KVBus(Settings(redis_url=url.replace("rediss", "redis"), namespace=namespace)) as bus,
        pytest.raises(BusUnavailable),
    ):
        bus.workers()
