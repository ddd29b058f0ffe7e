"""Refusals: what of an engine's cache is not understood is named, never guessed."""

from __future__ import annotations

from kvxferd.errors import LayoutError


def layer_error(layer: str, why: str) -> LayoutError:
    """Return the error for a layer whose cache cannot be described."""
    return LayoutError(f"cannot describe the cache of layer {layer!r}: {why}")
