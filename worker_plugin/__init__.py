"""Carries out commands in every LMCache worker. Importing this loads neither LMCache nor torch."""

from __future__ import annotations

from worker_plugin.runtime import Worker, WorkerState, attach

__all__ = ["Worker", "WorkerState", "attach"]
