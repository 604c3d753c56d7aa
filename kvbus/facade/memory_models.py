"""The JSON bodies of the session ledger's routes."""

from __future__ import annotations

from typing import Literal

from kvbus.facade.models import Model


class SwitchReply(Model, frozen=True):
    """num_chunks: how many are to be brought into DDR, by the commands named."""

    status: Literal["switched"]
    num_sessions: int
    num_chunks: int
    command_ids: tuple[str, ...]


class CloseReply(Model, frozen=True):
    """num_chunks: how many the session held. command_ids: evicts given at once; others follow after the grace."""

    status: Literal["closed"]
    session: str
    num_chunks: int
    command_ids: tuple[str, ...]


class BeginReply(Model, frozen=True):
    """status: "already" when the request was announced before."""

    status: Literal["begun", "already"]
    request_id: str


class SessionInfo(Model, frozen=True):
    """One session. resident: leading chunks taken to be in DDR (with a budget alone). chunk_hashes: where asked for."""

    session: str
    tenant: str
    intent: str
    num_chunks: int
    resident: int
    running: int
    turns: int
    since_ms: int
    used_ms: int
    tags: tuple[tuple[str, ...], ...] = ()
    chunk_hashes: tuple[str, ...] = ()


class SessionsReply(Model, frozen=True):
    """The most recently used first. The rest tells of the whole ledger: sessions in all, different chunks held, chunks
    taken to be in DDR, running requests that were announced, chunks soon to be evicted.
    """

    sessions: tuple[SessionInfo, ...]
    total: int
    chunks: int
    resident: int
    running: int
    doomed: int


BODIES = (SwitchReply, CloseReply, BeginReply, SessionInfo, SessionsReply)
