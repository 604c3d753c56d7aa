"""The SSD tier's files: read whole or not at all, and by threads of a session's own while others are looked after.

No LMCache in here, and no locks of its.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

READERS = 2
"""Files read at once by one session: one to be copied while another one's is waited for."""


class Damaged(Exception):
    """A file does not hold what the index says."""


class Changed(Exception):
    """A file was written to while it was read."""


class Readers:
    """Threads for one session, started with the first file that is read ahead: most sessions need none.

    Daemons, unlike an executor's: a disk that does not answer must not keep its process from ending. For one thread.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, read: Callable[[], None]) -> Future[None]:
        """To be read by the next thread that is free. Cancelled in time, it is never read."""
        if len(self._threads) < READERS:
            thread = threading.Thread(target=self._run, name=f"kvbus-read-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)
        done: Future[None] = Future()
        self._work.put((done, read))
        return done

    def close(self) -> None:
        """When nothing is to be read any more."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            done, read = item
            if not done.set_running_or_notify_cancel():
                continue
            try:
                read()
            except BaseException as error:  # noqa: BLE001 - raised where the file is waited for
                done.set_exception(error)
            else:
                done.set_result(None)


def read_exactly(path: str, buffer: memoryview, most: int, *, direct: bool = False) -> None:
    """Fill the buffer from the start of a file that holds at least that many bytes and at most `most`.

    Raises FileNotFoundError; Damaged for a file of another size or one that ends early; Changed when the file was
    written to meanwhile (LMCache rewrites files in place).
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        before = os.fstat(file)
        if not len(buffer) <= before.st_size <= most:
            raise Damaged(f"its file has {before.st_size:,} bytes instead of {len(buffer):,} to {most:,}")
        done = 0 if direct else _cached(file, buffer)
        while done < len(buffer):
            got = os.preadv(file, [buffer[done:]], done)
            if got == 0:
                raise Damaged(f"its file ended after {done:,} of {len(buffer):,} bytes")
            done += got
        after = os.fstat(file)
        if (after.st_mtime_ns, after.st_size) != (before.st_mtime_ns, before.st_size):
            raise Changed
    finally:
        os.close(file)


def _cached(file: int, buffer: memoryview) -> int:
    """Take what the page cache has, and have the system fetch the rest in one go; returns the number of bytes taken.

    Read piece by piece, a disk gets to know of a file's end late; asked beforehand, a cached file costs a tenth more.
    """
    try:
        done = os.preadv(file, [buffer], 0, os.RWF_NOWAIT)
    except OSError:  # nothing of it is there, or this file system knows no such reads
        done = 0
    if done < len(buffer):
        try:
            os.posix_fadvise(file, done, len(buffer) - done, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # not every file system takes advice
    return done
