"""What stands in deploy/ and in the compose file, held against the programs that it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvbus.protocol.results import Counts, Status
from kvbus.settings import Settings
from tests.facade_kit import scene
from tests.servers import Server, require
from worker_plugin.standalone import _parser

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "deploy/grafana/kvbus.json").read_text())


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = require("yaml").safe_load((ROOT / "docker-compose.yml").read_text())
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]


def test_the_board_asks_only_for_numbers_that_the_facade_shows(valkey: Server, namespace: str) -> None:
    with scene(valkey.settings(namespace)) as here:
        here.worker()
        facade = here.facade()
        facade.post("/memory/evict", {"chunk_hashes": ["1"]})
        shown = facade.http.get("/metrics").text
    named = {name for text in expressions() for name in re.findall(r"kvbus_[a-z_]+", text)}
    own = {name for name in named if not name.startswith(("kvbus_worker_", "kvbus_publisher_"))}
    not_before_trouble = {"kvbus_facade_bus_errors_total", "kvbus_facade_results_bus_errors_total"}
    assert len(own) > 8
    assert {name for name in own if f"\n{name}" not in shown} <= not_before_trouble


def test_the_board_asks_only_for_counters_that_workers_and_publishers_keep() -> None:
    sources = "".join(
        path.read_text() for folder in ("worker_plugin", "publisher") for path in ROOT.glob(f"{folder}/*.py")
    )
    kept = set(re.findall(r'"([a-z_]+)"', sources))
    kept |= {f"chunks_{name}" for name in Counts.__struct_fields__} | {"kv_bytes"}
    kept |= {f"results_{status.value}" for status in Status}
    named = {
        found.removeprefix("kvbus_worker_").removeprefix("kvbus_publisher_")
        for text in expressions()
        for found in re.findall(r"kvbus_(?:worker|publisher)_[a-z_]+", text)
    }
    assert len(named) > 15
    assert named <= kept


def test_the_boards_panels_have_room() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in BOARD["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_compose_keeps_every_entry_and_evicts_none(compose: dict[str, Any]) -> None:
    command = compose["services"]["valkey"]["command"][0]
    for told in ("--appendonly yes", "--maxmemory-policy noeviction", "--aclfile"):
        assert told in command


def test_compose_opens_ports_to_this_machine_only(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (name, port)


def test_compose_gives_every_service_a_user_of_its_own_and_no_password(compose: dict[str, Any]) -> None:
    users = {}
    for name, service in compose["services"].items():
        url = service.get("environment", {}).get("KVBUS_REDIS_URL")
        if url is not None:
            user, password = re.fullmatch(r"redis://(\w+):(\S+)@valkey:6379/0", url).groups()  # type: ignore[union-attr]
            assert password == "${%s_PASSWORD:?}" % user.upper()  # noqa: UP031
            users[name] = user
    assert users == {"facade": "facade", "worker": "worker", "vllm": "engine"}


def test_compose_says_only_settings_that_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for name in service.get("environment", {}):
            if name.startswith("KVBUS_"):
                assert name.removeprefix("KVBUS_").lower() in Settings.__struct_fields__


def test_compose_starts_what_is_there(compose: dict[str, Any]) -> None:
    command = [str(part) for part in compose["services"]["worker"]["command"]]
    assert command[:3] == ["python", "-m", "worker_plugin.standalone"]
    assert _parser().parse_args(command[3:]).instance == "cpu"
    vllm = compose["services"]["vllm"]
    assert vllm["profiles"] == ["ascend"]
    config = next(part for part in vllm["command"] if part.startswith("--kv-transfer-config="))
    assert json.loads(config.partition("=")[2]) == {
        "kv_connector": "KVBusConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "worker_plugin.connector",
    }
    assert vllm["environment"]["PYTHONHASHSEED"] == "0"
    facade = compose["services"]["facade"]
    assert "/healthz" in facade["healthcheck"]["test"][-1]


def test_the_acl_files_patterns_fit_the_names_in_use() -> None:
    acl = (ROOT / "deploy/users.acl.in").read_text()
    assert "live:*/scheduler" in acl
    assert 'f"{instance}/scheduler"' in (ROOT / "worker_plugin/connector.py").read_text()
