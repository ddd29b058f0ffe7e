"""The ways in which a mover reads what a plan asks for."""

from __future__ import annotations

import os
from enum import StrEnum

READ_VARIABLE = "KVXFERD_READ"  # passes the setting mover.read to child movers


class ReadWay(StrEnum):
    """Direct: one descriptor a run. Covering: longer stretches into a chunk, and a scatter from there.

    Auto: for each pull and remote rank the way that is predicted to take less.
    """

    AUTO = "auto"
    DIRECT = "direct"
    COVERING = "covering"


def read_way_of_environment() -> ReadWay:
    """Return the way that this process's movers are to read; direct where none is named."""
    name = os.environ.get(READ_VARIABLE, "")
    return ReadWay(name) if name in set(ReadWay) else ReadWay.DIRECT
