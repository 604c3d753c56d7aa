"""Events on disk while the server is away: append-only files, bounded, read in the order of writing.

A segment is 8 bytes of magic, then records: crc32, body length, epoch, seq, body. A record that does not check out
ends its segment: a torn tail is cut off when the spool is opened. What was read and delivered is noted in `cursor`,
written without a sync: after a crash of the machine some events may be sent again, under the same epoch and seq.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvbus.errors import ProtocolError
from kvbus.protocol.limits import MAX_BODY_BYTES
from publisher.encode import Record, with_epoch

_log = logging.getLogger(__name__)

_MAGIC = b"KVBUSSP1"
_HEAD = struct.Struct(">IIQQ")
_CURSOR = struct.Struct(">QQI")
_READ_BYTES = 1 << 20


class SpoolBusy(Exception):
    """Another process has this spool open."""


class Renamed(msgspec.Struct, frozen=True):
    """Events spooled under epochs first..last are sent under epoch + shift."""

    first: int
    last: int
    shift: int


class _State(msgspec.Struct, frozen=True):
    last_epoch: int = 0
    renamed: tuple[Renamed, ...] = ()


class Spool:
    """One publisher's events on disk. For one thread; one process at a time, held by a lock on the directory.

    fsync: sync after every append. Without it a SIGKILL of the process loses nothing, a crash of the machine may.
    Raises SpoolBusy, or OSError when the directory cannot be used.
    """

    def __init__(self, directory: Path, cap_bytes: int, *, fsync: bool = False) -> None:
        self.directory = directory
        self.cap_bytes = cap_bytes
        self._fsync = fsync
        self._segment_bytes = max(64 * 1024, min(8 << 20, cap_bytes // 16))
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_directory(directory)
        self._write_fd = self._read_fd = self._cursor_fd = -1
        self._peeked: tuple[int, int] | None = None
        self.corrupt_bytes = 0
        try:
            self._state = self._load_state()
            self._segments = sorted(int(path.stem) for path in directory.glob("*.seg"))
            self._sizes = {index: self._path(index).stat().st_size for index in self._segments}
            if self._segments:
                self._cut_torn_tail(self._segments[-1])
            self._cursor_fd = os.open(directory / "cursor", os.O_RDWR | os.O_CREAT, 0o600)
            self._place = self._load_place()
            self._tidy()
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes on disk, delivered ones of a segment not yet done included."""
        return sum(self._sizes.values())

    @property
    def empty(self) -> bool:
        return not self._segments

    @property
    def last_epoch(self) -> int:
        """The highest epoch that was ever noted here."""
        return self._state.last_epoch

    def note_epoch(self, epoch: int) -> None:
        """Remember an epoch before anything is written or sent under it. Raises OSError."""
        if epoch > self._state.last_epoch:
            self._save_state(_State(epoch, self._state.renamed))

    def rename_epochs(self, last: int, above: int) -> int:
        """Send whatever is spooled under epochs up to `last` under epochs above `above`, in the same order.

        Returns the new epoch that stands for `last`. Kept on disk, so that a successor does the same. Raises OSError.
        """
        first = min((record.epoch for record in self.peek(1, 1)), default=last)
        shift = above + 1 - first
        self._save_state(_State(last + shift, (*self._state.renamed, Renamed(first, last, shift))))
        return last + shift

    def append(self, records: Sequence[Record]) -> bool:
        """Write all records, or none: False when the spool has no room for them. Raises OSError, with none written."""
        data = b"".join(_pack(record) for record in records)
        if self.nbytes + len(data) + len(_MAGIC) > self.cap_bytes:
            return False
        if self._write_fd < 0 or self._sizes[self._segments[-1]] >= self._segment_bytes:
            self._new_segment()
        index = self._segments[-1]
        try:
            _write_all(self._write_fd, data)
            if self._fsync:
                os.fdatasync(self._write_fd)
        except OSError:
            os.ftruncate(self._write_fd, self._sizes[index])
            raise
        self._sizes[index] += len(data)
        return True

    def peek(self, max_events: int, max_bytes: int) -> list[Record]:
        """The oldest records not yet acknowledged, at least one if there is any, of one segment."""
        while self._segments:
            index, offset = self._place
            records, end = self._read(index, offset, max_events, max_bytes)
            if records:
                self._peeked = (index, end)
                return records
            self._drop_head()
        return []

    def ack(self) -> None:
        """What the last `peek` gave has been delivered."""
        if self._peeked is None:
            return
        self._place, self._peeked = self._peeked, None
        index, offset = self._place
        if offset >= self._sizes[index]:
            self._drop_head()
        else:
            self._save_place()

    def close(self) -> None:
        """Let go of the files and of the lock; what is spooled stays."""
        for fd in (self._write_fd, self._read_fd, self._cursor_fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._write_fd = self._read_fd = self._cursor_fd = self._lock = -1

    # --- segments

    def _path(self, index: int) -> Path:
        return self.directory / f"{index:012d}.seg"

    def _new_segment(self) -> None:
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1
        index = max(self._place[0], self._segments[-1] if self._segments else 0) + 1
        fd = os.open(self._path(index), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(fd, _MAGIC)
            if self._fsync:
                _sync_directory(self.directory)
        except OSError:
            os.close(fd)
            self._path(index).unlink(missing_ok=True)
            raise
        self._write_fd = fd
        self._sizes[index] = len(_MAGIC)
        self._segments.append(index)
        if len(self._segments) == 1:
            self._begin_head()

    def _begin_head(self) -> None:
        self._place = (self._segments[0], len(_MAGIC))
        self._save_place()

    def _drop_head(self) -> None:
        """The oldest segment holds nothing more."""
        index = self._segments.pop(0)
        self._peeked = None
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1
        if not self._segments and self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1
        self._path(index).unlink(missing_ok=True)
        del self._sizes[index]
        if self._segments:
            self._begin_head()
        else:
            self._place = (index, 0)  # indexes only rise, so that an old cursor never fits a new segment
            self._save_place()
            if self._state.renamed:
                self._save_state(_State(self._state.last_epoch))

    def _read(self, index: int, offset: int, max_events: int, max_bytes: int) -> tuple[list[Record], int]:
        """Records from an offset, and where they end. What does not check out ends the segment."""
        if self._read_fd < 0:
            self._read_fd = os.open(self._path(index), os.O_RDONLY)
        size = self._sizes[index]
        data = os.pread(self._read_fd, min(size - offset, max(_READ_BYTES, max_bytes)), offset)
        records: list[Record] = []
        at = used = 0
        while len(records) < max_events and offset + at < size and (not records or used < max_bytes):
            record, end = _unpack(data, at)
            if record is None and offset + len(data) < size:
                if records:
                    break  # the rest of this one is in the next read
                data = os.pread(self._read_fd, min(size - offset, _HEAD.size + MAX_BODY_BYTES), offset)
                record, end = _unpack(data, at)
            if record is None:
                lost = size - offset - at
                self.corrupt_bytes += lost
                _log.error(
                    "spool %s: %d bytes at %d cannot be read and are skipped", self._path(index), lost, offset + at
                )
                # Only here, so that what precedes it is still read.
                self._sizes[index] = offset + at
                if index == self._segments[-1] and self._write_fd >= 0:
                    os.close(self._write_fd)  # the next append begins a segment that can be read
                    self._write_fd = -1
                break
            records.append(self._renamed(record))
            used += end - at
            at = end
        return records, offset + at

    def _renamed(self, record: Record) -> Record:
        epoch = record.epoch
        for rule in self._state.renamed:
            if rule.first <= epoch <= rule.last:
                epoch += rule.shift
        if epoch == record.epoch:
            return record
        try:
            return with_epoch(record, epoch)
        except (ProtocolError, msgspec.MsgspecError) as error:
            _log.error("spool: event %d/%d cannot be renamed to epoch %d: %s", record.epoch, record.seq, epoch, error)
            return record

    def _cut_torn_tail(self, index: int) -> None:
        """Cut what a crash left half written at the end of the newest segment."""
        path, size = self._path(index), self._sizes[index]
        data = path.read_bytes()
        at = len(_MAGIC) if data.startswith(_MAGIC) else 0
        while at and at < len(data):
            record, end = _unpack(data, at)
            if record is None:
                break
            at = end
        if at < size:
            _log.warning("spool %s: the last %d bytes were not written whole and are cut off", path, size - at)
            self.corrupt_bytes += size - at
            os.truncate(path, at)
            self._sizes[index] = at

    def _tidy(self) -> None:
        """Remove what the cursor has passed; a segment left by another process is never written to again."""
        while self._segments and (self._segments[0] < self._place[0] or self._sizes[self._segments[0]] <= len(_MAGIC)):
            index = self._segments.pop(0)
            self._path(index).unlink(missing_ok=True)
            del self._sizes[index]
        if not self._segments:
            return
        if self._place[0] != self._segments[0]:
            self._begin_head()
        elif self._place[1] >= self._sizes[self._segments[0]]:
            self._drop_head()

    # --- what is kept beside the segments

    def _load_place(self) -> tuple[int, int]:
        raw = os.pread(self._cursor_fd, _CURSOR.size, 0)
        if len(raw) == _CURSOR.size:
            index, offset, crc = _CURSOR.unpack(raw)
            if crc == zlib.crc32(raw[:16]):
                return index, offset
        return 0, 0

    def _save_place(self) -> None:
        head = struct.pack(">QQ", *self._place)
        os.pwrite(self._cursor_fd, head + struct.pack(">I", zlib.crc32(head)), 0)

    def _load_state(self) -> _State:
        try:
            return msgspec.json.decode((self.directory / "epoch").read_bytes(), type=_State)
        except FileNotFoundError:
            return _State()
        except msgspec.MsgspecError as error:
            _log.error("spool %s: `epoch` cannot be read (%s); the clock stands in for it", self.directory, error)
            return _State()

    def _save_state(self, state: _State) -> None:
        new = self.directory / "epoch.new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(fd, msgspec.json.encode(state))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(new, self.directory / "epoch")
        _sync_directory(self.directory)
        self._state = state


def _pack(record: Record) -> bytes:
    rest = struct.pack(">IQQ", len(record.body), record.epoch, record.seq)
    return struct.pack(">I", zlib.crc32(record.body, zlib.crc32(rest))) + rest + record.body


def _unpack(data: bytes, at: int) -> tuple[Record | None, int]:
    """The record at `at` and the place behind it; None if the bytes do not hold a whole, true one."""
    begin = at + _HEAD.size
    if begin > len(data):
        return None, at
    crc, length, epoch, seq = _HEAD.unpack_from(data, at)
    end = begin + length
    if end > len(data) or crc != zlib.crc32(data[at + 4 : end]):
        return None, at
    return Record(epoch, seq, data[begin:end]), end


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _lock_directory(directory: Path) -> int:
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise SpoolBusy(f"spool {directory} is in use by another process") from None
        raise
    return fd


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot
            os.fsync(fd)
    finally:
        os.close(fd)
