"""The spool: in order, bounded, and whole again after whatever a crash leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.protocol import RequestFinished, decode_entry
from publisher import FinishedRequest
from publisher.encode import Record, encode
from publisher.spool import Spool, SpoolBusy

CAP = 8 << 20


def records(first: int, count: int, *, epoch: int = 1, size: int = 100) -> list[Record]:
    return [Record(epoch, seq, seq.to_bytes(4, "big") * (size // 4)) for seq in range(first, first + count)]


def drained(spool: Spool, batch: int = 7) -> list[int]:
    seqs = []
    while found := spool.peek(batch, 1 << 20):
        seqs += [record.seq for record in found]
        spool.ack()
    return seqs


def test_in_order_and_empty_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CAP)
    assert spool.empty
    for first in range(0, 50, 10):
        assert spool.append(records(first, 10))
    assert spool.peek(3, CAP) == records(0, 3)
    assert spool.peek(3, CAP) == records(0, 3), "not acknowledged: the same again"
    spool.ack()
    assert drained(spool) == list(range(3, 50))
    assert spool.empty
    assert list(tmp_path.glob("*.seg")) == []
    assert spool.append(records(50, 1))
    assert drained(spool) == [50]
    spool.close()


def test_a_successor_goes_on_where_the_cursor_stood(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CAP)
    spool.append(records(0, 20))
    spool.peek(8, CAP)
    spool.ack()
    spool.peek(8, CAP)  # never acknowledged
    spool.close()
    spool = Spool(tmp_path, CAP)
    spool.append(records(20, 5, epoch=2))
    assert drained(spool) == list(range(8, 25))
    spool.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CAP)
    with pytest.raises(SpoolBusy):
        Spool(tmp_path, CAP)
    spool.close()
    Spool(tmp_path, CAP).close()


def test_many_segments_are_bounded_and_deleted_as_they_are_done(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1 << 20)
    taken = 0
    while spool.append(records(taken, 10, size=1000)):
        taken += 10
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.seg"))
    assert 900_000 < on_disk == spool.nbytes <= 1 << 20
    assert len(list(tmp_path.glob("*.seg"))) > 10
    spool.peek(200, 1 << 20)
    spool.ack()
    assert spool.append(records(taken, 10, size=1000)), "room again"
    assert drained(spool)[-1] == taken + 9
    spool.close()


@pytest.mark.parametrize("cut", [1, 10, 24, 30, 124])
def test_a_torn_tail_is_cut_off(tmp_path: Path, cut: int) -> None:
    spool = Spool(tmp_path, CAP)
    spool.append(records(0, 3))
    spool.close()
    path = next(tmp_path.glob("*.seg"))
    os.truncate(path, path.stat().st_size - cut)
    spool = Spool(tmp_path, CAP)
    assert spool.corrupt_bytes == (124 - cut)
    spool.append(records(3, 2))
    assert drained(spool) == [0, 1, 3, 4]
    spool.close()


def test_a_tail_of_zeros_is_cut_off(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CAP)
    spool.append(records(0, 3))
    spool.close()
    with next(tmp_path.glob("*.seg")).open("ab") as file:
        file.write(bytes(5000))
    spool = Spool(tmp_path, CAP)
    assert spool.corrupt_bytes == 5000
    assert drained(spool) == [0, 1, 2]
    spool.close()


def test_damage_in_the_middle_costs_one_segment_and_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1 << 20)
    spool.append(records(0, 100, size=1000))
    spool.append(records(100, 10, size=1000))
    spool.close()
    path = min(tmp_path.glob("*.seg"))
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(b"\xff")
    spool = Spool(tmp_path, 1 << 20)
    seqs = drained(spool)
    assert seqs == list(range(48)) + list(range(100, 110))
    assert spool.corrupt_bytes == path_bytes(52)
    assert spool.empty
    spool.close()


def path_bytes(count: int) -> int:
    return count * (1000 + 24)


def test_damage_in_the_segment_being_written_does_not_spoil_what_follows(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CAP)
    spool.append(records(0, 4))
    with next(tmp_path.glob("*.seg")).open("r+b") as file:
        file.seek(8 + 2 * 124 + 30)
        file.write(b"\xff")
    assert [record.seq for record in spool.peek(10, CAP)] == [0, 1]
    spool.append(records(4, 2))
    spool.ack()
    assert drained(spool) == [4, 5]
    spool.close()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xff", b'{"last_epoch":"x"}'])
def test_an_unreadable_epoch_file_or_cursor_does_not_stop_the_rest(tmp_path: Path, content: bytes) -> None:
    spool = Spool(tmp_path, CAP)
    spool.note_epoch(5)
    spool.append(records(0, 3))
    spool.close()
    (tmp_path / "epoch").write_bytes(content)
    (tmp_path / "cursor").write_bytes(content)
    spool = Spool(tmp_path, CAP)
    assert spool.last_epoch == 0
    assert drained(spool) == [0, 1, 2]
    spool.close()


def test_an_append_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, CAP, fsync=True)
    spool.append(records(0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            spool.append(records(2, 2))
    spool.append(records(4, 1))
    assert drained(spool) == [0, 1, 4]
    spool.close()


def event(epoch: int, seq: int) -> Record:
    finished = FinishedRequest(request_id=f"r{seq}", instance="i", reason="stop")
    return encode(finished, (), publisher="p", epoch=epoch, seq=seq, finished_at_ms=1)[0]


def test_epochs_that_readers_would_take_for_old_are_renamed_for_good(tmp_path: Path) -> None:
    spool = Spool(tmp_path, CAP)
    spool.append([event(100, 4), event(100, 5), event(160, 0)])
    assert spool.rename_epochs(160, above=500) == 561
    spool.peek(1, CAP)
    spool.ack()
    spool.close()
    spool = Spool(tmp_path, CAP)
    assert spool.last_epoch == 561
    spool.append([event(700, 0)])
    found = []
    while batch := spool.peek(9, CAP):
        for record in batch:
            message = decode_entry("1-1", record.fields("p")).message
            assert isinstance(message, RequestFinished)
            assert (message.epoch, message.seq) == (record.epoch, record.seq)
            found.append((record.epoch, record.seq))
        spool.ack()
    assert found == [(501, 5), (561, 0), (700, 0)]
    spool.close()


def test_sigkill_loses_nothing_that_append_returned_for(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from publisher.encode import Record
from publisher.spool import Spool
spool = Spool(Path({str(tmp_path)!r}), {CAP})
for seq in range(500):
    assert spool.append([Record(1, seq, bytes(1000))])
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    spool = Spool(tmp_path, CAP)
    assert drained(spool) == list(range(500))
    spool.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_survived_and_what_is_read_is_true(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    spool = Spool(directory, CAP)
    spool.append(records(0, 30))
    spool.close()
    path = next(directory.glob("*.seg"))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    spool = Spool(directory, CAP)
    seqs = drained(spool)
    assert seqs == list(range(len(seqs)))
    assert spool.append(records(90, 1))
    assert drained(spool) == [90]
    spool.close()
