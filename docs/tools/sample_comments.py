"""What the comments of the sample configuration explain."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.config.sample import sample_text


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
