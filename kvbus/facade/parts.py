"""What one running application is made of, and how a route gets at it."""

from __future__ import annotations

from starlette.requests import Request

from kvbus.facade.events import Events
from kvbus.facade.metrics import Metrics
from kvbus.facade.observe import Observer
from kvbus.facade.service import Facade
from kvbus.facade.status import StatusBook
from kvbus.settings import Settings
from kvbus.streams.connection import Bus


class Parts:
    """Made when the application starts, within its event loop."""

    def __init__(self, settings: Settings, bus: Bus | None, metrics: Metrics) -> None:
        self.metrics = metrics
        self.facade = Facade(settings, bus)
        self.book = StatusBook(self.facade)
        self.observer = Observer(self.facade, metrics)
        self.events = Events(self.facade, metrics.event_streams)


def parts(request: Request) -> Parts:
    """The parts of the application that serves this request."""
    found: Parts = request.app.state.parts
    return found
