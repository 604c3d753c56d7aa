"""Real LMCache engines on the CPU, one or more a test, closed at its end."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.servers import require

if TYPE_CHECKING:
    from tests.integration.engines import EngineUnderTest

_numbers = itertools.count()

MakeEngine = Callable[..., "EngineUnderTest"]


@pytest.fixture(scope="session")
def _lmcache() -> None:
    """Import LMCache (some seconds) only where a test needs it."""
    # Read while it is imported: no usage report leaves the machine, and only errors are logged.
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its own dependencies deprecate
        for module in ("cache_engine", "gpu_connector.xpu_connectors"):  # the second is imported late, in a store
            require(f"lmcache.v1.{module}")


@pytest.fixture
def make_engine(tmp_path: Path, _lmcache: None) -> Iterator[MakeEngine]:
    """make_engine(lock_timeout=..., max_share=..., **CpuEngineConfig fields) -> EngineUnderTest."""
    from tests.integration.engines import EngineUnderTest
    from worker_plugin.cpu_engine import CpuEngineConfig

    made: list[EngineUnderTest] = []

    def make(*, lock_timeout: float = 5.0, max_share: float = 0.8, **fields: Any) -> EngineUnderTest:
        number = next(_numbers)
        fields.setdefault("disk_dir", tmp_path / f"ssd{number}")
        fields.setdefault("disk_gb", 1.0)
        fields.setdefault("cpu_gb", 0.02)
        fields.setdefault("chunk_size", 16)
        config = CpuEngineConfig(instance_id=f"test-{os.getpid()}-{number}", **fields)
        made.append(EngineUnderTest(config, lock_timeout=lock_timeout, max_share=max_share))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> EngineUnderTest:
    return make_engine()
