"""The sample configuration: every setting with its unit, its default and the reason for it."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

SAMPLE_NAME = "kvxferd.toml"  # beside this module; `config/kvxferd.toml` of the repository is a link to it


def sample_text() -> str:
    """Return the sample's text, with its comments."""
    return files("kvxferd.config").joinpath(SAMPLE_NAME).read_text("utf-8")


class SampleComments(NamedTuple):
    """What the sample's comments explain."""

    sections: dict[str, str]  # by the table's name
    keys: dict[str, str]  # by "section.key"; keys without a comment share that of the key before them


def sample_comments() -> SampleComments:
    """Return the comments of the sample's tables and keys, each as one paragraph."""
    comments = SampleComments({}, {})
    section, lines, last = "", list[str](), ""
    for line in sample_text().splitlines():
        if line.startswith("#"):
            lines.append(line.removeprefix("#").strip())
            continue
        comment = " ".join(lines)
        lines = []
        if line.startswith("["):
            section, last = line.strip("[]"), ""
        elif "=" in line:
            last = comment or last
            comments.keys[f"{section}.{line.partition('=')[0].strip()}"] = last
        elif (
            section and comment
        ):  # an empty line: what stands above it, below the table's name, is the table's
            comments.sections[section] = comment
    return comments
