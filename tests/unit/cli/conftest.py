"""A served node that verbs ask."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.verb_harness import daemon


@pytest.fixture
async def socket(tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """The option that names the socket of a daemon that never changes."""
    async with daemon(tmp_path) as config:
        yield "--socket", config.control.socket
