"""Places and spans as people write them: an entry id, a date, a time ago, a duration. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from kvbus.errors import ConfigError

_ID = re.compile(r"\d{1,20}(-\d{1,20})?", re.ASCII)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", re.ASCII)
_UNIT_MS = {"ms": 1, "": 1_000, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_span_ms(text: str) -> int:
    """Milliseconds of "250ms", "30s", "10m", "2h", "7d"; a bare number counts seconds. Raises ConfigError."""
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise ConfigError(f"{text!r} is not a span of time", hint="Write 250ms, 30s, 10m, 2h or 7d.")
    return int(float(found[1]) * _UNIT_MS[found[2]])


def parse_place(text: str, now_ms: int) -> str:
    """The entry id to begin behind: an id as it is, a date or a time ago as the last id before it.

    now_ms: the server's time. Entry ids carry the server's clock at the time of writing, unless somebody wrote an id
    from the future by hand. Raises ConfigError.
    """
    word = text.strip()
    if _ID.fullmatch(word):
        return word
    ago = _SPAN.fullmatch(word.removesuffix(" ago").removesuffix("ago"))
    if ago and ago[2]:
        return before_ms(now_ms - parse_span_ms(ago[0]))
    try:
        moment = datetime.fromisoformat(word)
    except ValueError:
        raise ConfigError(
            f"{text!r} is neither an entry id nor a time",
            hint="Write an id such as 1764480000000-0, a date such as 2026-11-30T05:00, or a time ago such as 10m.",
        ) from None
    return before_ms(int(moment.timestamp() * 1000))


def before_ms(moment_ms: int) -> str:
    """The highest id that an entry written before this moment can have."""
    return f"{moment_ms - 1}-18446744073709551615" if moment_ms > 0 else "0-0"


def id_ms(entry_id: str) -> int:
    """The server's clock when the entry was written, as its id says."""
    return int(entry_id.partition("-")[0])


def clock_text(moment_ms: int) -> str:
    """Local time with milliseconds; the date too when it is not today."""
    try:
        moment = datetime.fromtimestamp(moment_ms / 1000, tz=UTC).astimezone()
    except (OverflowError, OSError, ValueError):
        return str(moment_ms)  # an id from the far future
    shown = moment.strftime("%H:%M:%S.") + f"{moment_ms % 1000:03d}"
    return shown if moment.date() == datetime.now(UTC).astimezone().date() else f"{moment:%Y-%m-%d} {shown}"


def span_text(milliseconds: float) -> str:
    """A duration for people: 12 ms, 3.4 s, 5 min, 2.1 h, 3.0 d."""
    if milliseconds < 1_000:
        return f"{milliseconds:.0f} ms" if milliseconds >= 10 or not milliseconds else f"{milliseconds:.1f} ms"
    for unit, size, limit in (("s", 1_000, 100), ("min", 60_000, 100), ("h", 3_600_000, 48)):
        if milliseconds < limit * size:
            return f"{milliseconds / size:.1f} {unit}"
    return f"{milliseconds / 86_400_000:.1f} d"
