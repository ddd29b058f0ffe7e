"""Imports without what they would drag in."""

from __future__ import annotations

import sys

import pytest

from kvxferd.import_blocking import block_import


def test_what_is_hidden_cannot_be_imported_and_can_be_later() -> None:
    with pytest.raises(ImportError), block_import("wave"):
        import wave
    import wave  # noqa: F401


def test_what_is_there_stays() -> None:
    with block_import("sys"):
        import sys as again
    assert again is sys
