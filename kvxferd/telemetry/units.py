"""Numbers as people read them, for the terminal. `control/status_page.html` writes them by the same rules."""

from __future__ import annotations

import math
from datetime import UTC, datetime

UNKNOWN = "-"


def format_rate(bytes_per_s: float) -> str:
    """Return a speed in decimal units, as benchmarks and network cards name it: ``1.52 GB/s``."""
    for limit, unit in ((1e3, "B/s"), (1e6, "kB/s"), (1e9, "MB/s")):
        if bytes_per_s < limit:
            return f"{_three_digits(bytes_per_s / limit * 1e3)} {unit}"
    return f"{_three_digits(bytes_per_s / 1e9)} GB/s"


def format_size(num_bytes: float) -> str:
    """Return a size in decimal units: ``1.52 GB``."""
    return format_rate(num_bytes).removesuffix("/s")


def format_time(seconds: float | None) -> str:
    """Return a duration with three digits: ``12.3 ms``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1e-3:
        return f"{_three_digits(seconds * 1e6)} us"
    if seconds < 1.0:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 120.0:
        return f"{_three_digits(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def format_share(share: float) -> str:
    """Return a share of 0 to 1 as a percentage; one above zero never reads as zero: ``<0.1 %``."""
    if 0 < share < 0.001:
        return "<0.1 %"
    return f"{share * 100:.1f} %" if 0 < share < 0.9995 else f"{share * 100:.0f} %"


def format_count(number: int) -> str:
    """Return a whole number with separators: ``2,782``."""
    return f"{number:,}"


def format_clock(unix_time: float) -> str:
    """Return a time of day in UTC: ``23:46:05``. 0 is not known."""
    return _format_utc(unix_time, "%H:%M:%S")


def format_date(unix_time: float) -> str:
    """Return date and time in UTC: ``2026-11-22 23:46:05``. 0 is not known."""
    return _format_utc(unix_time, "%Y-%m-%d %H:%M:%S")


def _format_utc(unix_time: float, form: str) -> str:
    if not unix_time:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(unix_time, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def _three_digits(value: float) -> str:
    if value >= 99.95 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
