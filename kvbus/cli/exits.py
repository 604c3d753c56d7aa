"""Exit codes, and which error ends in which."""

from __future__ import annotations

from enum import IntEnum

from kvbus.errors import BusUnavailable, ConfigError, KVBusError, MissingExtra, ProtocolError


class ExitCode(IntEnum):
    OK = 0
    WRONG = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "all is well",
    ExitCode.WRONG: "the command ran and found something wrong: a worker failed, a check failed, nothing was found",
    ExitCode.USAGE: "the command was called wrongly: an option, a hash, a setting or a profile",
    ExitCode.UNREACHABLE: "the bus cannot be reached, or it did not answer in time",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C (`up` and `serve`, which end no other way, answer 0)",
}


def exit_code_of(error: type[KVBusError]) -> ExitCode:
    """The exit code of a command that ends with this error."""
    if issubclass(error, BusUnavailable):
        return ExitCode.UNREACHABLE
    if issubclass(error, ConfigError | MissingExtra | ProtocolError):
        return ExitCode.USAGE
    return ExitCode.WRONG
