"""Limits of the table, low enough to be reached."""

from __future__ import annotations

import pytest

from kvxferd.core.limits import table


def lower(monkeypatch: pytest.MonkeyPatch, limit: table.Limit, total: int) -> None:
    """Have nodes that are made from now on hold no more than so much of a limit."""
    monkeypatch.setattr(table, "TABLE", {**table.TABLE, limit.name: limit._replace(total=total)})
