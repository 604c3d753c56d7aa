"""Schemathesis, with every check it has, over the whole OpenAPI document: with a token and without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facade_kit import Scene, scene
from tests.servers import RealServer

TOKEN = "correct-horse"
# An event stream without an end would never be answered.
CONFIG = """
[[operations]]
include-path = "/memory/events"
parameters = { "query.seconds" = 0.05 }
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("token", [None, TOKEN], ids=["open", "token"])
def test_facade_does_what_its_document_says(
    valkey: RealServer, namespace: str, tmp_path: Path, token: str | None
) -> None:
    with scene(valkey.settings(namespace)) as here:
        here.worker("a/0")
        here.worker("a/1", stores=False)
        done = _schemathesis(here, tmp_path, token)
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
    selected = re.search(r"Operations: +(\d+) selected / (\d+) total", done.stdout)
    assert selected is not None
    assert selected[1] == selected[2]


def _schemathesis(here: Scene, tmp_path: Path, token: str | None) -> subprocess.CompletedProcess[str]:
    facade = here.facade(rest_token=token)
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    headers = ["-H", f"Authorization: Bearer {token}"] if token else []
    return subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{facade.url}/openapi.json", *headers),
            *("--checks", "all", "--phases", "examples,coverage,fuzzing", "--max-examples", "15"),
            *("--generation-deterministic", "--continue-on-failure", "--no-color"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=220,
    )
