"""The sample configuration: every setting with its unit, its default and the reason for it."""

from __future__ import annotations

from importlib.resources import files

SAMPLE_NAME = "kvxferd.toml"  # beside this module; `config/kvxferd.toml` of the repository is a link to it


def sample_text() -> str:
    """Return the sample's text, with its comments."""
    return files("kvxferd.config").joinpath(SAMPLE_NAME).read_text("utf-8")
