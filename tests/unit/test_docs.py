"""The docs speak of things that exist: tests, files, settings, error codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbus.errors import all_errors
from kvbus.settings import Settings

ROOT = Path(__file__).parents[2]
DOCS = sorted(ROOT.glob("docs/*.md"))
PAGES = [ROOT / "README.md", *DOCS]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_named_tests_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_promises_name_tests() -> None:
    assert len(re.findall(r"::test_\w+`", (ROOT / "docs/promises.md").read_text())) > 40


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_named_settings_exist(page: Path) -> None:
    sources = "".join(file.read_text() for file in (ROOT / "kvbus").rglob("*.py"))
    outside = set(re.findall(r"\"(KVBUS_[A-Z_]+)\"", sources))  # options of single commands
    for name in set(re.findall(r"\bKVBUS_[A-Z_]*[A-Z]\b", page.read_text())) - outside:
        assert name.removeprefix("KVBUS_").lower() in Settings.__struct_fields__, name


def test_every_error_code_is_explained_once() -> None:
    codes = [error.code for error in all_errors()]
    assert len(codes) == len(set(codes))
    assert all(error.default_hint and error.__doc__ for error in all_errors())


def test_the_first_screen_says_how_to_begin() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert "make demo" in first
    assert "make test" in first


def test_every_setting_is_documented_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    shown = {name: text.strip().strip("`") for name, text in rows}
    defaults = Settings()
    expected = {}
    for name in Settings.__struct_fields__:
        value = getattr(defaults, name)
        expected[name] = (
            "" if value is None or value == "" else str(value).lower() if value in (True, False) else str(value)
        )
    assert shown == expected
