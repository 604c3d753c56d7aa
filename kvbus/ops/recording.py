"""The recording file: compact, versioned, checked, and readable up to where it was torn. No sockets.

The file is MAGIC, then frames. A frame is one msgpack array [kind, crc32 of payload, payload]:

    HEADER  a msgpack map: format, id, namespace, streams, created_at_ms, kvbus
    BLOCK   zlib over a msgpack array of entries [stream number, milliseconds, serial, [name, value, name, value, ...]]
    END     a msgpack map: how many entries of each stream came before, and how many were missed

A recording that is added to has an END before each addition. One without an END at its end was not closed; whatever
follows the last whole frame is a torn tail, and is told, never guessed at.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgpack
import msgspec

import kvbus
from kvbus.errors import ConfigError, UndecodableEntry
from kvbus.protocol.codec import Fields

MAGIC = b"KVBREC\r\n"
"""Eight bytes; the line end in it shows a transfer that mended line ends."""
FORMAT = 1
BLOCK_ENTRIES = 256
BLOCK_BYTES = 1 << 20
MAX_FRAME_BYTES = 64 << 20
_READ_BYTES = 1 << 18

HEADER, BLOCK, END = 0, 1, 2


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of."""

    format: int = FORMAT
    id: str
    namespace: str
    streams: tuple[str, ...]
    created_at_ms: int = 0
    kvbus: str = kvbus.__version__


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How many entries came before, by stream; and how many are known to be missing among them."""

    entries: dict[str, int]
    missed: int = 0


class Recorded(msgspec.Struct, frozen=True):
    """One entry as it stood in its stream."""

    stream: str
    entry_id: str
    fields: Fields


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a recording. whole: every frame is sound and the end is there."""

    path: str
    header: Header
    entries: dict[str, int]
    first_id: str = ""
    last_id: str = ""
    file_bytes: int
    raw_bytes: int
    """Bytes of all names and values, uncompressed."""
    missed: int = 0
    torn_bytes: int = 0
    damaged: tuple[str, ...] = ()
    ended: bool = False

    @property
    def whole(self) -> bool:
        return self.ended and not self.damaged and not self.torn_bytes


_header_decoder = msgspec.msgpack.Decoder(Header)
_end_decoder = msgspec.msgpack.Decoder(End)


class RecordingWriter:
    """Writes one recording. Use `create` or `append`; as a context manager it is closed with its END."""

    def __init__(self, file: IO[bytes], header: Header, entries: dict[str, int], last_ids: dict[str, str]) -> None:
        self.header = header
        self.entries = entries
        """Entries so far, by stream."""
        self.last_ids = last_ids
        """The newest entry of each stream."""
        self.missed = 0
        self._file = file
        self._numbers = {name: number for number, name in enumerate(header.streams)}
        self._block: list[tuple[int, int, int, list[bytes]]] = []
        self._block_bytes = 0

    @classmethod
    def create(cls, path: Path, *, namespace: str, streams: Sequence[str], now_ms: int) -> Self:
        """A new file. Raises ConfigError when it is there already or cannot be written."""
        try:
            file = path.open("xb")
        except FileExistsError:
            raise ConfigError(
                f"{path} exists already", hint="Choose another name, or add to the recording with --append."
            ) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="Choose another place.") from None
        header = Header(id=os.urandom(8).hex(), namespace=namespace, streams=tuple(streams), created_at_ms=now_ms)
        file.write(MAGIC)
        writer = cls(file, header, dict.fromkeys(streams, 0), {})
        writer._frame(HEADER, msgspec.msgpack.encode(header))
        writer._file.flush()
        return writer

    @classmethod
    def append(cls, path: Path) -> Self:
        """Go on with a recording behind its last sound frame; a torn tail is cut off.

        Raises ConfigError, and ProtocolError when it is damaged in the middle.
        """
        with RecordingReader(path) as reader:
            last_ids = {found.stream: found.entry_id for found in reader}
            file = path.open("r+b")
            file.truncate(reader.sound_bytes)
            file.seek(reader.sound_bytes)
            writer = cls(file, reader.header, dict(reader.entries), last_ids)
            writer.missed = reader.missed
            return writer

    def add(self, stream: str, entry_id: str, fields: Fields) -> None:
        """One entry; it is in the file when its block is full or `flush` is called."""
        milliseconds, _, serial = entry_id.partition("-")
        flat = [part for item in fields.items() for part in item]
        self._block.append((self._numbers[stream], int(milliseconds), int(serial), flat))
        self._block_bytes += sum(map(len, flat))
        self.entries[stream] = self.entries.get(stream, 0) + 1
        self.last_ids[stream] = entry_id
        if len(self._block) >= BLOCK_ENTRIES or self._block_bytes >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system: a kill of this process loses nothing of it."""
        if self._block:
            self._frame(BLOCK, zlib.compress(msgpack.packb(self._block), 6))
            self._block, self._block_bytes = [], 0
        self._file.flush()

    def close(self) -> None:
        """Write the END and the file to the disk."""
        if self._file.closed:
            return
        self.flush()
        self._frame(END, msgspec.msgpack.encode(End(entries=self.entries, missed=self.missed)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _frame(self, kind: int, payload: bytes) -> None:
        self._file.write(msgpack.packb([kind, zlib.crc32(payload), payload]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class RecordingReader:
    """Reads one recording, once, with flat memory. Iterate for the entries; then the attributes tell the rest.

    lenient: pass over damaged blocks and list them in `damaged`, instead of raising.
    """

    def __init__(self, path: Path, *, lenient: bool = False) -> None:
        """Raises ConfigError when it cannot be opened, UndecodableEntry when it is not a recording we know."""
        self.path = path
        self.lenient = lenient
        self.entries: dict[str, int] = {}
        self.missed = 0
        self.sound_bytes = len(MAGIC)
        """Up to here all frames are whole."""
        self.torn_bytes = 0
        self.ended = False
        """The last frame is an END."""
        self.damaged: list[str] = []
        try:
            self._file = path.open("rb")
            self.file_bytes = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="Name a recording.") from None
        try:
            self._frames = self._read_frames()
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __iter__(self) -> Iterator[Recorded]:
        streams = self.header.streams
        for at, kind, payload in self._frames:
            self.ended = False
            if kind == BLOCK:
                for number, milliseconds, serial, flat in self._unpack_block(at, payload):
                    found = Recorded(
                        streams[number],
                        f"{milliseconds}-{serial}",
                        dict(zip(flat[::2], flat[1::2], strict=True)),
                    )
                    self.entries[found.stream] = self.entries.get(found.stream, 0) + 1
                    yield found
            elif kind == END:
                self._check_end(at, payload)
            # a kind of frame that a later release added says nothing to this one

    def _check_end(self, at: int, payload: bytes) -> None:
        try:
            end = _end_decoder.decode(payload)
        except msgspec.MsgspecError as error:
            self._damage(at, f"END cannot be read: {error}")
            return
        self.ended, self.missed = True, end.missed
        counted = {name: count for name, count in self.entries.items() if count}
        if counted != {name: count for name, count in end.entries.items() if count} and not self.damaged:
            self._damage(at, f"END counts {end.entries}, but {counted} are there")

    def _unpack_block(self, at: int, payload: bytes) -> list[Any]:
        try:
            inflater = zlib.decompressobj()
            raw = inflater.decompress(payload, MAX_FRAME_BYTES)
            if inflater.unconsumed_tail:
                raise ValueError(f"more than {MAX_FRAME_BYTES:,} bytes")
            block = msgpack.unpackb(raw, raw=True)
            for number, milliseconds, serial, flat in block:
                if not (
                    0 <= number < len(self.header.streams)
                    and type(milliseconds) is type(serial) is int
                    and len(flat) % 2 == 0
                    and all(type(part) is bytes for part in flat)
                ):
                    raise ValueError("an entry of another shape")
            return list(block)
        except (zlib.error, ValueError, TypeError, msgpack.UnpackException) as error:
            self._damage(at, f"block cannot be read: {error}")
            return []

    def _damage(self, at: int, what: str) -> None:
        if not self.lenient:
            raise UndecodableEntry(
                f"{self.path}: damaged at byte {at:,}: {what}", hint="`kvbus verify` tells what of it is sound."
            )
        self.damaged.append(f"byte {at:,}: {what}")

    def _read_header(self) -> Header:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise UndecodableEntry(f"{self.path} is not a recording", hint="Name a file that `kvbus record` has made.")
        found = next(self._frames, None)
        if found is None or found[1] != HEADER:
            raise UndecodableEntry(
                f"{self.path} has no header: it was torn at its very start", hint="Nothing of it can be used."
            )
        try:
            header = _header_decoder.decode(found[2])
        except msgspec.MsgspecError as error:
            raise UndecodableEntry(f"{self.path}: its header cannot be read: {error}") from None
        if header.format != FORMAT:
            raise UndecodableEntry(
                f"{self.path} has format {header.format}; this release knows {FORMAT}", hint="Upgrade kvbus."
            )
        return header

    def _read_frames(self) -> Iterator[tuple[int, int, bytes]]:
        """(place in the file, kind, payload) of every whole frame."""
        unpacker = msgpack.Unpacker(raw=True, max_buffer_size=2 * MAX_FRAME_BYTES, max_bin_len=MAX_FRAME_BYTES)
        while True:
            at = self.sound_bytes
            try:
                frame = unpacker.unpack()
            except msgpack.OutOfData:
                piece = self._file.read(_READ_BYTES)
                if not piece:
                    self.torn_bytes = self.file_bytes - at
                    return
                unpacker.feed(piece)
                continue
            except (msgpack.UnpackException, ValueError) as error:
                self.torn_bytes = self.file_bytes - at
                self._damage(at, f"not a frame, nothing behind it can be read: {error}")
                return
            if not (isinstance(frame, list) and len(frame) == 3 and isinstance(frame[2], bytes)):
                self.torn_bytes = self.file_bytes - at
                self._damage(at, "not a frame, nothing behind it can be read")
                return
            self.sound_bytes = len(MAGIC) + unpacker.tell()
            kind, crc, payload = frame
            if zlib.crc32(payload) != crc:
                self._damage(at, "the checksum does not fit")
                continue
            yield at, kind, payload

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def verify(path: Path) -> Verified:
    """Read all of a recording and say what is there. Raises ConfigError, or UndecodableEntry if it is not one."""
    first = last = ""
    raw_bytes = 0
    with RecordingReader(path, lenient=True) as reader:
        for found in reader:
            first = first or found.entry_id
            last = found.entry_id
            raw_bytes += sum(len(name) + len(value) for name, value in found.fields.items())
        return Verified(
            path=str(path),
            header=reader.header,
            entries=dict(reader.entries),
            first_id=first,
            last_id=last,
            file_bytes=reader.file_bytes,
            raw_bytes=raw_bytes,
            missed=reader.missed,
            torn_bytes=reader.torn_bytes,
            damaged=tuple(reader.damaged),
            ended=reader.ended,
        )
