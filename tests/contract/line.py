"""The line between a process and its server, with all that a network and a SIGKILL can do to a call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import redis

from kvbus.streams import log, subscription
from kvbus.streams.connection import Client

MAX_TURNS = 400
"""A history that is not done after so many quiet turns is stuck, or spins."""


class Killed(BaseException):
    """The process is gone. Not an Exception: nothing in it gets to handle this."""


FAULTS = ("kill before", "kill after", "lost", "reply lost", "late")
"""late: the server sees the call when its sender has long given up."""


class Weather(Protocol):
    """What decides over faults: a client without any, dice, and how many calls there were."""

    client: Client
    rng: random.Random
    calls: int
    strike: tuple[int, str] | None
    """Which call is to suffer which fault."""


class Line:
    """A process's connection to the server: a redis client, with the faults that a network and a SIGKILL can bring."""

    def __init__(self, world: Weather) -> None:
        self._world = world
        self.fault_rate = 0.0
        self.kill_rate = 0.0
        self.late: list[Callable[[], object]] = []
        """Scripts whose sender has given up, and that the server has not seen yet."""

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._world.client, name)
        if not callable(target):
            return target

        def call(*args: Any, **kwargs: Any) -> Any:
            fault = self._fault()
            writes = name in ("evalsha", "eval")
            if fault == "kill before":
                raise Killed
            if fault == "lost" or (fault in ("reply lost", "late") and not writes):
                raise redis.ConnectionError("cut")
            if fault == "late":
                self.late.append(lambda: target(*args, **kwargs))
                raise redis.TimeoutError("late")
            answer = target(*args, **kwargs)
            if fault == "kill after":
                raise Killed
            if fault == "reply lost":
                raise redis.TimeoutError("the reply is lost")
            return answer

        return call

    def _fault(self) -> str:
        world = self._world
        world.calls += 1
        if world.strike is not None and world.strike[0] == world.calls:
            return world.strike[1]
        dice = world.rng.random()
        if dice < self.fault_rate:
            return world.rng.choice(FAULTS[2:])
        return world.rng.choice(FAULTS[:2]) if dice < self.fault_rate + self.kill_rate else ""

    def deliver_late(self) -> None:
        """Let the server see what was delayed, in the order in which it was sent."""
        late, self.late = self.late, []
        for send in late:
            send()


class Clock:
    """Stands in for the `time` module, so that what happens now and then happens at the same step of every run."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def clocked(patch: pytest.MonkeyPatch) -> Clock:
    """A clock that counts steps, not seconds: the same seed runs the same history on a slow machine."""
    clock = Clock()
    for module in (subscription, log):
        patch.setattr(module, "time", clock)
    return clock
