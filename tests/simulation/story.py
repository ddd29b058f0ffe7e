"""Tells of an episode what concerns the promise that it breaks, in few lines, the broken promise last."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SORTS = (re.compile(r"\bt\d+\b"), re.compile(r"\b(?:prefill|decode)\d+"))  # transfers, engines
_PULLS = re.compile(r"(\S+): pulls (t\d+ of \w+) into .*, (\d+)$")
_PULL = re.compile(r"\bpull (\d+) of (\S+?\.\d+/[\w.]+)")
LINE = 240  # of which so much is told
_NOISE = " text=TransferTopology("  # a rank's whole plan


def tell(story: Sequence[str], check: str, problem: str, limit: int) -> list[str]:
    """Return at most `limit` lines of an episode's story, which ends with its broken promise.

    A line concerns the promise unless it names transfers or engines and none of those that the promise is
    about, or is a message of no transfer.
    """

    pulls = {(found[3], found[1]): found[2] for line in story if (found := _PULLS.search(line))}
    about = " ".join([problem, *(pulls.get(pull, "") for pull in _PULL.findall(problem))])
    parties = [(sort, set(sort.findall(about))) for sort in _SORTS]

    def concerns(line: str) -> bool:
        if _NOISE in line or (" sends " in line and not _SORTS[0].search(line)):
            return False
        named = [(set(sort.findall(line)), of) for sort, of in parties]
        return all(not names or not of or names & of for names, of in named)

    kept = [line[:LINE] for line in story if concerns(line)]
    return [f"... of {len(story)} lines", *kept[-limit:], f"{check}: {problem}"]
