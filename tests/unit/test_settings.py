"""Settings: from the environment and a mapping, typed, checked, and never showing a secret."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import ConfigError
from kvbus.settings import Settings, check_name, default_instance, load_settings, redact_url


def test_defaults_without_anything() -> None:
    assert load_settings({}, {}) == Settings()
    assert Settings().rest_host == "127.0.0.1"
    assert Settings().rest_port == 6999


def test_every_setting_has_its_variable() -> None:
    samples: dict[type, tuple[str, Any]] = {
        int: ("123", 123),
        bool: ("off", False),
        float: ("0.5", 0.5),
        str: ("x", "x"),
    }
    odd: dict[str, tuple[str, Any]] = {
        "hash_algorithm": ("blake3", "blake3"),
        "spool_fsync": ("batch", "batch"),
        "heartbeat_ms": ("2000", 2_000),
        "live_ms": ("9000", 9_000),
        "rest_insecure": ("yes", True),
        "kvcache_debug_enabled": ("1", True),
    }
    for name in Settings.__struct_fields__:
        text, value = (
            odd.get(name) or samples[type(getattr(Settings(), name)) if getattr(Settings(), name) is not None else str]
        )
        assert getattr(load_settings({}, {f"KVBUS_{name.upper()}": text}), name) == value, name


def test_mapping_goes_before_the_environment() -> None:
    env = {"KVBUS_NAMESPACE": "env", "KVBUS_REST_PORT": "1"}
    loaded = load_settings({"namespace": "mapping"}, env)
    assert (loaded.namespace, loaded.rest_port) == ("mapping", 1)


def test_prefix_picks_ours_out_of_a_larger_mapping() -> None:
    loaded = load_settings({"kvbus.namespace": "n", "lmcache.chunk": 1, "namespace": "not ours"}, {}, prefix="kvbus.")
    assert loaded.namespace == "n"


def test_unknown_names_are_errors_in_a_mapping_only() -> None:
    with pytest.raises(ConfigError, match="'namespac'") as caught:
        load_settings({"namespac": "n"}, {})
    assert "Did you mean namespace?" in caught.value.hint
    with pytest.raises(ConfigError, match=r"kvbus\.colour"):
        load_settings({"kvbus.colour": "n"}, {}, prefix="kvbus.")
    assert load_settings({}, {"KVBUS_COLOUR": "red"}) == Settings()


def test_empty_variable_is_an_absent_one() -> None:
    assert load_settings({}, {"KVBUS_NAMESPACE": ""}) == Settings()


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_yes(text: str) -> None:
    assert load_settings({}, {"KVBUS_REST_INSECURE": text}).rest_insecure is True


@pytest.mark.parametrize("text", ["0", "False", "no", "OFF"])
def test_no(text: str) -> None:
    assert load_settings({}, {"KVBUS_PUBLISH": text}).publish is False


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rest_port", "65536"),
        ("rest_port", "-1"),
        ("rest_port", "seven"),
        ("block_ms", "0"),
        ("block_ms", "5001"),
        ("publish", "perhaps"),
        ("prefetch_max_share", "0"),
        ("prefetch_max_share", "1.5"),
        ("hash_algorithm", "md5"),
        ("batch_events", "0"),
        ("events_cap_bytes", "1e99"),
    ],
)
def test_bad_value_is_named_with_its_origin(name: str, text: str) -> None:
    variable = f"KVBUS_{name.upper()}"
    with pytest.raises(ConfigError, match=variable) as caught:
        load_settings({}, {variable: text})
    assert text in caught.value.message
    with pytest.raises(ConfigError, match=name):
        load_settings({name: text}, {})


@pytest.mark.parametrize("name", ["", "a b", "a/b", "{a}", "a\n", "ä", "x" * 129, "*", "a:b"])
def test_names_that_cannot_be_part_of_a_key(name: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        Settings(namespace=name)
    with pytest.raises(ConfigError, match="reader"):
        check_name("reader", name)


def test_heartbeats_must_fit_twice_into_a_life() -> None:
    with pytest.raises(ConfigError, match="twice heartbeat_ms"):
        load_settings({}, {"KVBUS_LIVE_MS": "1999"})


def test_default_instance_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("plain", "with space", "ü", "x" * 300, ""):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert check_name("instance", default_instance())


SECRET_URLS = [
    "redis://:hunter2@host:6379/0",
    "redis://user:hunter2@host/0",
    "rediss://user:p@ss@hunter2@host/0",
    "redis://host/0?password=hunter2",
    "redis://host/0?db=1&PASSWORD=hunter2",
    "redis+sentinel://u:hunter2@h1:1,h2:2/m/0?sentinel_password=hunter2",
    "unix://user:hunter2@/run/redis.sock",
    "unix:///run/redis.sock?password=hunter2",
    "user:hunter2@host:6379",
    ":hunter2@host",
    "redis://[hunter2@host",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_no_secret_is_ever_shown(url: str) -> None:
    assert "hunter2" not in redact_url(url)
    settings = Settings(redis_url=url, rest_token="hunter2")
    for shown in (repr(settings), str(settings), f"{settings}", repr(settings.shown())):
        assert "hunter2" not in shown
    for broken in ({"redis_url": [url]}, {"rest_token": ["hunter2"]}):
        with pytest.raises(ConfigError) as caught:
            load_settings(broken, {})
        assert "hunter2" not in str(caught.value)
    # A value that is refused elsewhere drags no secret along.
    with pytest.raises(ConfigError) as caught:
        load_settings({"redis_url": url, "rest_token": "hunter2", "rest_port": "x"}, {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["redis://127.0.0.1:6379/0", "unix:///run/redis.sock?db=1", "redis+cluster://h1:1,h2:2", "rediss://user@host/0"],
)
def test_url_without_a_secret_is_shown_whole(url: str) -> None:
    assert redact_url(url) == url


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=8, max_size=12))
def test_any_password_is_struck_out(password: str) -> None:
    assert password not in redact_url(f"redis://user:{password}@h:1/0?password={password}")
