"""Announces finished requests and their chunk hashes. Works in any process; vLLM is not needed."""

from __future__ import annotations

from publisher.finished import FinishedRequest
from publisher.publisher import Publisher

__all__ = ["FinishedRequest", "Publisher"]
