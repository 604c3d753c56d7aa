"""The tree of errors. Every one has a stable code, the same in Python, CLI, REST, logs and docs, and a hint.

KVBusError
├── ConfigError             config            a setting is wrong
├── MissingExtra            missing_extra     an optional package is not installed
├── ProtocolError                             what cannot be taken from, or put on, the bus
│   ├── UndecodableEntry    undecodable       bytes that are not a message
│   ├── InvalidMessage      invalid           a message with a value that is not allowed
│   ├── OverLimit           over_limit        larger than the protocol allows
│   ├── UnknownType         unknown_type      a type or protocol version that this release does not know
│   └── PoisonEntry         poison            an entry on which a worker died again and again
├── BusError
│   ├── BusUnavailable      bus_unavailable   the server cannot be reached, or did not answer in time
│   ├── BusFull             bus_full          the server refuses writes: maxmemory reached
│   ├── BusRefused          bus_refused       the server answered with an error (ACL, wrong type, ...)
│   ├── HistoryLost         history_lost      the server does not hold what this reader had read
│   └── Fenced              fenced            another process has taken over this worker's name
├── WorkerError
│   ├── NoWorkers           no_workers        nobody is alive to carry a command out
│   ├── NotAnswered         not_answered      a worker did not answer in time
│   ├── Overloaded          overloaded        a worker has too much in hand to take more
│   ├── EngineFailed        engine_failed     the engine raised, or a chunk could not be read or removed
│   └── EngineIncompatible  engine_incompatible   this LMCache is not one that kvbus knows how to drive
└── Stopped                 stopped           used after it was closed
"""

from __future__ import annotations

from typing import ClassVar


class KVBusError(Exception):
    """Base of all errors that kvbus raises.

    The message says what failed, with which value; `hint` says what to do next; `code` never changes.
    """

    code: ClassVar[str] = "kvbus"
    default_hint: ClassVar[str] = "Run `kvbus doctor` to see the state of the bus."

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


class ConfigError(KVBusError):
    """A setting has a value that cannot be used."""

    code = "config"
    default_hint = "Correct the named setting; docs/settings.md lists them."


class MissingExtra(KVBusError):
    """An optional part was asked for, and its packages are not installed."""

    code = "missing_extra"
    default_hint = "Install the named extra, for example: pip install 'kvbus[rest,cli]'"


class ProtocolError(KVBusError):
    """What cannot be taken from, or put on, the bus. All that decoding ever raises is one of its children."""

    code = "protocol"
    default_hint = "Compare the message with docs/protocol.md."


class UndecodableEntry(ProtocolError):
    """Bytes that are not a message at all."""

    code = "undecodable"
    default_hint = "Send a msgpack map in `body`, or a JSON object in `json`."


class InvalidMessage(ProtocolError):
    """A message with a missing field, or with a value that is not allowed."""

    code = "invalid"
    default_hint = "Correct the named field; docs/protocol.md lists what each may hold."


class OverLimit(ProtocolError):
    """Larger than the protocol allows."""

    code = "over_limit"
    default_hint = "Split the message; docs/protocol.md lists the limits."


class UnknownType(ProtocolError):
    """A type, or a protocol version, that this release does not know."""

    code = "unknown_type"
    default_hint = "Correct the type, or upgrade this reader if the writer is newer."


class PoisonEntry(ProtocolError):
    """An entry on which a worker died again and again; it was set aside so that the next ones run."""

    code = "poison"
    default_hint = "Look at it with `kvbus dead show`, mend the cause, then `kvbus dead requeue`."


class BusError(KVBusError):
    """Something between this process and the Redis or Valkey server."""

    code = "bus"


class BusUnavailable(BusError):
    """The server cannot be reached, or it did not answer in time. The last write may or may not have been applied."""

    code = "bus_unavailable"
    default_hint = "Check that the server runs and that KVBUS_REDIS_URL names it; kvbus tries again by itself."


class BusFull(BusError):
    """The server refuses writes because its memory limit is reached."""

    code = "bus_full"
    default_hint = "Raise maxmemory on the server, or lower the KVBUS_*_CAP_BYTES settings."


class BusRefused(BusError):
    """The server answered with an error."""

    code = "bus_refused"
    default_hint = "Check the ACL of this user, and that the keys of this namespace hold what kvbus wrote."


class HistoryLost(BusError):
    """The server lost what this reader had read (restart without persistence, FLUSHALL, lost-tail failover)."""

    code = "history_lost"
    default_hint = "Give the server an append-only file; docs/promises.md says what a lost history means."


class Fenced(BusError):
    """Another living process has the same worker name; the older one must stop."""

    code = "fenced"
    default_hint = "Give every worker its own instance and rank; `kvbus workers` shows who is alive."


class WorkerError(KVBusError):
    """Something with the workers or with the engine in one of them."""

    code = "worker"


class NoWorkers(WorkerError):
    """Nobody is alive to carry a command out."""

    code = "no_workers"
    default_hint = "Start a worker, or check the namespace; `kvbus workers` shows who is alive."


class NotAnswered(WorkerError):
    """A worker that owes a result did not answer in time; it may still carry the command out."""

    code = "not_answered"
    default_hint = "`kvbus lag` shows how far the named worker is behind."


class Overloaded(WorkerError):
    """A worker has so much in hand that it takes no more long commands."""

    code = "overloaded"
    default_hint = "Send fewer and larger prefetches, or wait for the results of earlier ones."


class EngineFailed(WorkerError):
    """The engine raised an error while it carried a command out."""

    code = "engine_failed"
    default_hint = "Look at the worker's log and at its disk; other commands go on."


class EngineIncompatible(WorkerError):
    """The installed LMCache is not one that kvbus knows how to drive safely."""

    code = "engine_incompatible"
    default_hint = "Install a version from docs/compatibility.md."


class Stopped(KVBusError):
    """An object was used after it was closed."""

    code = "stopped"
    default_hint = "Make a new one."


def all_errors() -> list[type[KVBusError]]:
    """Every class of the tree, parents first."""
    found: list[type[KVBusError]] = []
    waiting: list[type[KVBusError]] = [KVBusError]
    while waiting:
        cls = waiting.pop(0)
        found.append(cls)
        waiting.extend(cls.__subclasses__())
    return found
