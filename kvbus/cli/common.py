"""What all commands share: the options for every command, the way to the bus, and how errors end a command."""

from __future__ import annotations

import _thread
import functools
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import msgspec
import typer

from kvbus.cli.exits import ExitCode, exit_code_of
from kvbus.cli.output import Output, styled
from kvbus.client import KVBus
from kvbus.errors import KVBusError
from kvbus.ops.profiles import load_profile, profile_names
from kvbus.settings import Settings
from kvbus.streams.connection import Bus

P = ParamSpec("P")

PANEL = "For every command"


class Common(msgspec.Struct, frozen=True):
    """The options for every command. They may stand before the command's name or behind it."""

    profile: str | None = None
    url: str | None = None
    namespace: str | None = None
    json: bool | None = None
    debug: bool = False

    def over(self, outer: Common) -> Common:
        """These, and where they are silent, those given before the command's name."""
        return Common(
            profile=self.profile or outer.profile,
            url=self.url or outer.url,
            namespace=self.namespace or outer.namespace,
            json=outer.json if self.json is None else self.json,
            debug=self.debug or outer.debug,
        )


def _complete_profile(incomplete: str) -> list[str]:
    return [name for name in profile_names() if name.startswith(incomplete)]


COMMON_OPTIONS: dict[str, Any] = {
    "profile": Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME",
            help="Settings under this name in the profiles file, instead of KVBUS_PROFILE.",
            rich_help_panel=PANEL,
            autocompletion=_complete_profile,
        ),
    ],
    "url": Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="The server, instead of KVBUS_REDIS_URL.", rich_help_panel=PANEL),
    ],
    "namespace": Annotated[
        str | None,
        typer.Option("--namespace", "-n", metavar="NAME", help="Instead of KVBUS_NAMESPACE.", rich_help_panel=PANEL),
    ],
    "json": Annotated[
        bool | None,
        typer.Option(
            "--json/--table",
            help="JSON lines, or tables and text. By itself: text on a terminal, JSON lines in a pipe.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ],
    "debug": Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=PANEL)],
}
_DEFAULTS = Common()


class Cli:
    """What a command works with: its output, its settings, and the bus."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.out = Output(common.json)

    @property
    def profile(self) -> str | None:
        """The profile that was asked for."""
        return self.common.profile or os.environ.get("KVBUS_PROFILE") or None

    @functools.cached_property
    def settings(self) -> Settings:
        """Options first, then the profile, then KVBUS_* variables. Raises ConfigError."""
        given = {"redis_url": self.common.url, "namespace": self.common.namespace}
        return load_profile(self.profile, {name: value for name, value in given.items() if value is not None})

    @contextmanager
    def bus(self) -> Iterator[Bus]:
        """The bus, closed at the end."""
        bus = Bus(self.settings, client_name="kvbus-cli")
        try:
            yield bus
        finally:
            bus.close()

    @contextmanager
    def client(self) -> Iterator[KVBus]:
        """A client that can send commands and wait for answers, closed at the end."""
        with self.bus() as bus, KVBus(bus=bus, issuer="kvbus-cli") as client:
            yield client

    def fail(self, error: KVBusError) -> None:
        """Tell an error: its code, what failed with which value, and what to do next."""
        self.out.clear()
        notes = self.out.notes
        notes.print(styled("error ", "bold red") + styled(str(error)), soft_wrap=True)
        cause = error.__cause__
        if cause is not None and str(cause) and str(cause) not in str(error):
            notes.print(styled(f"  cause: {type(cause).__name__}: {cause}"), soft_wrap=True)
        if error.hint:
            notes.print(styled("  next:  ", "bold") + styled(error.hint), soft_wrap=True)
        notes.print(styled(f"  more:  kvbus errors {error.code}", "dim"), soft_wrap=True)

    def _failed(self, error: KVBusError) -> ExitCode:
        if self.common.debug:
            traceback.print_exc()
        self.fail(error)
        return exit_code_of(type(error))

    def run(self, work: Callable[[], ExitCode | None]) -> ExitCode:
        """Do a command's work; whatever happens ends in an exit code."""
        try:
            code = work()
            sys.stdout.flush()
            return ExitCode.OK if code is None else code
        except KeyboardInterrupt:
            self.out.clear()
            return ExitCode.INTERRUPTED
        except BrokenPipeError:
            # `| head` has all that it wanted: no error, and nothing to complain about
            self.out.close_quietly()
            return ExitCode.OK
        except KVBusError as error:
            return self._failed(error)
        except OSError as error:
            return self._failed(KVBusError(str(error), hint="Look at the file, its rights and the room on its disk."))
        except Exception as error:  # noqa: BLE001 - the last resort: a person gets a sentence, --debug the rest
            hint = "This is a fault of kvbus: run it again with --debug, and report what it shows."
            return self._failed(KVBusError(f"unexpected {type(error).__name__}: {error}", hint=hint))


EXAMPLES: dict[str, tuple[str, ...]] = {}
"""Command name to the examples in its help; the docs show them, and a test runs each."""


def command(
    app: typer.Typer, name: str, *, group: str = "", examples: Sequence[str] = (), takes_hashes: bool = False
) -> Callable[[Callable[Concatenate[Cli, P], ExitCode | None]], Callable[Concatenate[Cli, P], ExitCode | None]]:
    """Register a function as a command: it gets a Cli first, and every command the options for all.

    group: the name of the sub-app, if any. examples: command lines, the first the most common. takes_hashes: its
    arguments may begin with a minus, as every second chunk hash does; no short option of it may be a hex digit.
    """
    EXAMPLES[f"{group} {name}".strip()] = tuple(examples)
    epilog = "Examples:\n\n" + "\n\n".join(f"  $ {example}" for example in examples) if examples else None

    def register(
        function: Callable[Concatenate[Cli, P], ExitCode | None],
    ) -> Callable[Concatenate[Cli, P], ExitCode | None]:
        work: Callable[..., ExitCode | None] = function  # its parameters come from the command line, checked there

        def run(ctx: typer.Context, **values: Any) -> None:
            own = Common(**{option: values.pop(option) for option in COMMON_OPTIONS})
            cli = Cli(own.over(ctx.find_root().obj or _DEFAULTS))
            code = cli.run(lambda: work(cli, **values))
            raise typer.Exit(int(code))

        hints = get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        common = [
            inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=getattr(_DEFAULTS, option), annotation=annotation
            )
            for option, annotation in COMMON_OPTIONS.items()
        ]
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            for parameter in parameters
        ]
        run.__signature__ = inspect.Signature([context, *own, *common])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (context, *own, *common)}
        run.__doc__ = function.__doc__
        run.__name__ = function.__name__
        app.command(name, epilog=epilog, context_settings={"ignore_unknown_options": takes_hashes})(run)
        return function

    return register


@contextmanager
def stopped_by_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets: what runs in the block ends in good order. A second one breaks it off."""
    stop, told = threading.Event(), False

    def set_or_break(number: int, frame: object) -> None:
        nonlocal told
        if told:
            raise KeyboardInterrupt
        told = True
        # Not here: this may interrupt the event's own `wait` while it has the lock that `set` takes, and hang for ever.
        _thread.start_new_thread(stop.set, ())

    before = {number: signal.signal(number, set_or_break) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_text(path: str) -> str:
    """A file's text, or standard input's for "-"."""
    return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
