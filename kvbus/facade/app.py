"""The facade as an ASGI application, and as a process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

import kvbus
from kvbus.errors import KVBusError
from kvbus.facade import commands
from kvbus.facade.errors import Refused, on_kvbus_error, on_refused
from kvbus.facade.service import Facade
from kvbus.settings import Settings, load_settings
from kvbus.streams.connection import Bus


def create_app(settings: Settings | None = None, bus: Bus | None = None) -> FastAPI:
    """The application. settings: None reads KVBUS_* from the environment. bus: one that exists already, not closed."""
    chosen = settings or load_settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        facade = app.state.facade = Facade(chosen, bus)
        await facade.start()
        try:
            yield
        finally:
            await facade.stop()

    app = FastAPI(
        title="kvbus", version=kvbus.__version__, lifespan=lifespan, root_path=chosen.rest_root_path, redoc_url=None
    )
    app.add_exception_handler(Refused, on_refused)
    app.add_exception_handler(KVBusError, on_kvbus_error)
    app.include_router(commands.router)
    return app


def run(settings: Settings | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    chosen = settings or load_settings()
    uvicorn.run(create_app(chosen), host=chosen.rest_host, port=chosen.rest_port)
