"""Places, spans, filters, versions, profiles: the pure parts under the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import ConfigError
from kvbus.ops.compatibility import LMCACHE, VLLM, fits
from kvbus.ops.entries import Filter, Filters, Needle, look_at
from kvbus.ops.explain import outcome_of
from kvbus.ops.lag import behind_of
from kvbus.ops.profiles import load_profile, profiles_path, read_profiles
from kvbus.ops.when import id_ms, parse_place, parse_span_ms, span_text
from kvbus.protocol.codec import encode_entry, encode_json_entry
from kvbus.protocol.commands import Evict, Lookup, Prefetch
from kvbus.protocol.results import ChunkLists, CommandResult, Counts, Held, Status
from kvbus.streams.log import StreamState
from kvbus.streams.position import UNKNOWN, Position
from tests.cli_kit import ROOT, finished

NOW = 1_764_480_000_000


@pytest.mark.parametrize(
    ("text", "span"), [("250ms", 250), ("30s", 30_000), ("30", 30_000), ("1.5m", 90_000), ("7d", 604_800_000)]
)
def test_spans(text: str, span: int) -> None:
    assert parse_span_ms(text) == span


@pytest.mark.parametrize("text", ["", "m", "-5s", "5 minutes", "1e3s", "５s"])
def test_no_spans(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_span_ms(text)


def test_places() -> None:
    assert parse_place("1764480000000-3", NOW) == "1764480000000-3"
    assert parse_place("1764480000000", NOW) == "1764480000000"
    assert id_ms(parse_place("10m", NOW)) == NOW - 600_000 - 1
    assert parse_place("10m ago", NOW) == parse_place("10m", NOW)
    assert id_ms(parse_place("2025-11-30T05:20:00Z", NOW)) == NOW - 1
    for text in ("yesterday", "", "12-34-56", "1764480000000-"):
        with pytest.raises(ConfigError):
            parse_place(text, NOW)


def test_spans_for_people() -> None:
    assert [span_text(n) for n in (0, 0.25, 12, 3_400, 300_000, 7_200_000, 259_200_000)] == [
        "0 ms", "0.2 ms", "12 ms", "3.4 s", "5.0 min", "2.0 h", "3.0 d"
    ]  # fmt: skip


HASHES = st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(min_size=32, max_size=32))


@given(chunk=HASHES, others=st.lists(HASHES, max_size=5))
def test_a_needle_never_overlooks_its_chunk(chunk: int | bytes, others: list[int | bytes]) -> None:
    message = Evict(chunk_hashes=(*others, chunk))
    for fields in (encode_entry(message, message_id="m"), encode_json_entry(message)):
        assert Needle(chunk).may_be_in(fields)
        seen = look_at("commands", "1-0", fields)
        assert Filter(Filters(hashes=(chunk,))).matches(seen)
        absent = Filter(Filters(hashes=(b"\x00" * 32,)))
        assert absent.matches(seen) == (b"\x00" * 32 in message.chunk_hashes)


def test_filters_ask_for_all_fields_and_any_value() -> None:
    event = finished(1, [5], context={"session": "s"})
    seen = look_at("events", "1-0", encode_entry(event, message_id="m"))

    def matches(**wanted: tuple[str, ...]) -> bool:
        return Filter(Filters(**wanted)).matches(seen)

    assert matches()
    assert matches(sessions=("x", "s"), instances=("host-a",), types=("request.finished",))
    assert not matches(sessions=("s",), instances=("host-b",))
    assert not matches(workers=("host-a/0",))
    assert not matches(commands=("m",)), "an event is no command"


def test_behind() -> None:
    state = StreamState(length=5, first_id="6-0", last_id="10-0", entries_added=10)
    assert behind_of(Position("10-0", "", UNKNOWN), state) == 0
    assert behind_of(Position("7-0", "", 7), state) == 3
    assert behind_of(Position("7-0", "", UNKNOWN), state) is None
    assert behind_of(Position("2-0", "", 2), state) == 5, "what was trimmed cannot be read any more"
    assert behind_of(Position("2-0", "", 2), StreamState(last_id="10-0", entries_added=10)) == 0


def test_outcome_of_one_chunk() -> None:
    def outcome(counts: Counts, lists: ChunkLists = ChunkLists(), held: Held | None = None) -> str:  # noqa: B008
        command = Lookup(chunk_hashes=(1, 2)) if held else Prefetch(chunk_hashes=(1, 2))
        result = CommandResult(
            command_id="c", type=command.TYPE, status=Status.DONE, counts=counts, chunks=lists, held=held
        )
        return ": ".join(outcome_of(2, 1, result)).removesuffix(": ")

    assert outcome(Counts(requested=2, loaded=2)) == "loaded"
    assert outcome(Counts(requested=2, loaded=1, resident=1)) == "loaded or resident"
    assert outcome(Counts(requested=2, loaded=1, missing=1), ChunkLists(missing=(2,))) == "missing"
    assert outcome(Counts(requested=2, loaded=1, missing=1), ChunkLists(missing=(1,))) == "loaded"
    assert outcome(Counts(requested=2, loaded=1, missing=1)) == "loaded or not among those that the result names"
    assert outcome(Counts(requested=2), held=Held(("A", "B"), b"\x00\x03")) == "looked up: A, B"


def test_compatibility() -> None:
    assert fits("0.4.3", LMCACHE)
    assert fits("0.4.4+cpu", LMCACHE)
    assert not fits("0.4.30", LMCACHE)
    assert fits("0.18.0", VLLM)
    assert fits("0.18.0+cpu", VLLM)
    assert not fits("0.18.1", VLLM)
    assert not fits("0.18.00", ("0.18.0",))
    assert not fits("unknown", VLLM)
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for name, tried in (("LMCache", LMCACHE), ("vLLM", VLLM)):
        assert all(f"| {name} | {version}" in page for version in tried), "doctor and docs say the same"


def test_profiles(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    env = {"KVBUS_PROFILES_FILE": str(path), "KVBUS_NAMESPACE": "by-variable", "KVBUS_BLOCK_MS": "111"}
    assert profiles_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/kvbus/profiles.toml")
    assert read_profiles(path) == {}
    assert load_profile(None, env=env).namespace == "by-variable"
    path.write_text('[a]\nnamespace = "by-profile"\nconsume = false\n[wrong]\nnamespac = "x"\n')
    settings = load_profile("a", {"reply_timeout_ms": 5}, env)
    assert (settings.namespace, settings.consume, settings.block_ms, settings.reply_timeout_ms) == (
        "by-profile", False, 111, 5
    )  # fmt: skip
    assert load_profile("a", {"namespace": "by-option"}, env).namespace == "by-option"
    with pytest.raises(ConfigError, match="namespac"):
        load_profile("wrong", env=env)
    path.write_text("top = 1\n")
    with pytest.raises(ConfigError, match="not a table"):
        read_profiles(path)
