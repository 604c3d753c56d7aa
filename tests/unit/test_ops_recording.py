"""The recording file: what goes in comes out, torn at any byte it loses only its tail, and no flipped bit is missed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import ConfigError, UndecodableEntry
from kvbus.ops import recording
from kvbus.ops.recording import BLOCK_ENTRIES, MAGIC, Recorded, RecordingReader, RecordingWriter, verify

STREAMS = ("events", "commands")
ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(STREAMS), st.dictionaries(st.binary(min_size=1, max_size=8), st.binary(max_size=64), max_size=4)
    ),
    max_size=40,
)


def write(path: Path, entries: list[tuple[str, dict[bytes, bytes]]], *, flush_every: int = 7) -> list[Recorded]:
    expected = []
    with RecordingWriter.create(path, namespace="n", streams=STREAMS, now_ms=1) as writer:
        for number, (stream, fields) in enumerate(entries):
            writer.add(stream, f"{number + 1}-{number % 3}", fields)
            expected.append(Recorded(stream, f"{number + 1}-{number % 3}", fields))
            if number % flush_every == flush_every - 1:
                writer.flush()
    return expected


def read(path: Path) -> list[Recorded]:
    with RecordingReader(path) as reader:
        return list(reader)


@given(entries=ENTRIES)
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, entries: list) -> None:
    path = tmp_path_factory.mktemp("r") / "a.kvrec"
    expected = write(path, entries)
    assert read(path) == expected
    found = verify(path)
    assert found.whole
    assert sum(found.entries.values()) == len(expected)
    assert found.header.namespace == "n"


def test_torn_at_any_byte_it_keeps_all_that_is_whole(tmp_path: Path) -> None:
    whole = tmp_path / "whole.kvrec"
    expected = write(whole, [("events", {b"a": b"%d" % number}) for number in range(20)])
    content = whole.read_bytes()
    torn = tmp_path / "torn.kvrec"
    most = 0
    for size in range(len(content)):
        torn.write_bytes(content[:size])
        try:
            found = read(torn)
        except UndecodableEntry:
            assert most == 0, "without its header there is nothing to read"
            continue
        assert found == expected[: len(found)]
        assert len(found) >= most, "a longer file has no fewer entries"
        most = len(found)
        assert not verify(torn).whole
    assert most == 20


def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    whole = tmp_path / "whole.kvrec"
    expected = write(whole, [("events", {b"name": b"value%d" % number}) for number in range(10)])
    content = bytearray(whole.read_bytes())
    damaged = tmp_path / "damaged.kvrec"
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x10
        damaged.write_bytes(changed)
        try:
            found = verify(damaged)
        except UndecodableEntry:
            continue
        assert not found.whole, place
        with RecordingReader(damaged, lenient=True) as reader:
            for entry in reader:
                assert entry in expected, "what is damaged is never taken for an entry"


def test_a_recording_goes_on_behind_its_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    expected = write(path, [("events", {b"a": b"1"})] * 9)
    path.write_bytes(path.read_bytes()[:-3])
    with RecordingWriter.append(path) as writer:
        assert writer.last_ids == {"events": expected[-1].entry_id}
        writer.add("commands", "100-0", {b"b": b"2"})
    assert read(path) == [*expected, Recorded("commands", "100-0", {b"b": b"2"})]
    assert verify(path).whole


def test_a_killed_writer_leaves_all_that_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    writer = RecordingWriter.create(path, namespace="n", streams=STREAMS, now_ms=1)
    for number in range(BLOCK_ENTRIES + 1):
        writer.add("events", f"{number + 1}-0", {b"a": b"b"})
    writer._file.flush()
    assert len(read(path)) == BLOCK_ENTRIES, "a full block goes out by itself"
    assert not verify(path).ended
    writer.close()
    assert verify(path).whole


def test_it_is_compact(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    write(path, [("events", {b"v": b"1", b"type": b"request.finished", b"body": b"same prompt" * 50})] * 500)
    found = verify(path)
    assert found.file_bytes < found.raw_bytes / 20


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    for name, content in {"empty": b"", "text": b"hello world, hello", "magic": MAGIC, "cut": MAGIC + b"\x93"}.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UndecodableEntry):
            verify(path)
    with pytest.raises(ConfigError):
        verify(tmp_path / "nosuch")
    with pytest.raises(ConfigError):
        RecordingWriter.create(tmp_path / "text", namespace="n", streams=STREAMS, now_ms=1)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    write(path, [])
    with RecordingReader(path) as reader:
        header = msgspec.structs.replace(reader.header, format=recording.FORMAT + 1)
    with path.open("wb") as file:
        file.write(MAGIC)
        writer = RecordingWriter(file, header, {}, {})
        writer._frame(recording.HEADER, msgspec.msgpack.encode(header))
        writer.close()
    with pytest.raises(UndecodableEntry, match="format 2"):
        verify(path)
