"""Tells of an episode what concerns the promise that it breaks, in few lines, the broken promise last.

A line of the story names transfers, engines and nodes. It is told if among those of each sort is one that the
broken promise is about; a message between nodes only if it names a transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_ENGINE = re.compile(r"\b(?:prefill|decode)\d+")
_NODE = re.compile(r"\bn\d+\b")
_TRANSFER = re.compile(r"\bt\d+\b")
_OWNED = re.compile(r"\b(t\d+) of (\w+)|\btransfer=(t\d+) source=(\w+)")
_PULLS = re.compile(r"(\S+): pulls (t\d+ of \w+) into .*, (\d+)$")
_TICKET = re.compile(r"(\S+): (?:Delivered|Failed|Quiesced|cancels) (\d+)\b")
_PULL = re.compile(r"\bpull (\d+) of (\S+?\.\d+/[\w.]+)")
LINE = 240  # of which so much is told
_BROKEN = " oracle: "
_IDLE = "ready=True connected=True pulls=0"
_NOISE = " text=TransferTopology("  # a rank's whole plan
_CONNECTION = (" is cut off from ", " is connected to ")


def tell(story: Sequence[str], check: str, problem: str, limit: int) -> list[str]:
    """Return at most `limit` lines of an episode's story: those of the parties of its broken promise."""
    lines, states = _until(story, check)
    lines, pulls = _with_transfers(lines)
    about = " ".join([problem, *(pulls.get((who, ticket), "") for ticket, who in _PULL.findall(problem))])
    parties = _Parties(about, lines, states)
    kept = [line for line in lines if parties.concern(line)]
    last = [line for line in states if parties.concern(line) and not line.endswith(_IDLE)][: limit // 4]
    told = kept[-max(1, limit - len(last) - 2) :]
    left_out = f"... {len(lines) - len(told)} of {len(lines)} lines are left out"
    return [left_out, *(line[:LINE] for line in (*told, *last)), f"{check}: {problem}"]


def _until(story: Sequence[str], check: str) -> tuple[list[str], list[str]]:
    """Return what was told before the promise broke, and what each worker was at then."""
    end = next((at for at, line in enumerate(story) if f"{_BROKEN}{check}: " in line), len(story))
    return list(story[:end]), [line for line in story[end + 1 :] if _BROKEN in line]


def _with_transfers(lines: Iterable[str]) -> tuple[list[str], dict[tuple[str, str], str]]:
    """Return the lines, with its transfer where one names a pull by its ticket, and each pull's transfer."""
    pulls: dict[tuple[str, str], str] = {}
    found = []
    for line in lines:
        if pull := _PULLS.search(line):
            pulls[pull[1], pull[3]] = pull[2]
        elif (ticket := _TICKET.search(line)) and (transfer := pulls.get((ticket[1], ticket[2]))):
            line = f"{line[: ticket.end()]}, {transfer}{line[ticket.end() :]}"  # noqa: PLW2901
        found.append(line)
    return found, pulls


class _Parties:
    """Whom a broken promise is about; a sort of which it names none leaves nothing out."""

    def __init__(self, about: str, lines: Sequence[str], states: Iterable[str]) -> None:
        self.transfers = set(_TRANSFER.findall(about))
        self.engines = set(_ENGINE.findall(about))
        self.owned = self._owned(about)
        if not self.owned:  # the promise names no source: all of which its engine has pulled that transfer
            pulls = (pull[2] for line in lines if (pull := _PULLS.search(line)) and self._is_of(line))
            self.owned = self._owned(" ".join(pulls))
        self.engines |= {source for _, source in self.owned}
        at = [line for line in states if set(_ENGINE.findall(line)) & self.engines]
        self.nodes = set(_NODE.findall(" ".join([about, *at])))

    def _owned(self, text: str) -> set[tuple[str, str]]:
        found = {(a or c, b or d) for a, b, c, d in _OWNED.findall(text)}
        return {one for one in found if one[0] in self.transfers}

    def _is_of(self, line: str) -> bool:
        """Whether a transfer and an engine are named of those that the promise names."""
        engines = set(_ENGINE.findall(line))
        return bool(set(_TRANSFER.findall(line)) & self.transfers and engines & self.engines)

    def concern(self, line: str) -> bool:
        """Whether a line is about them."""
        is_message = " network: " in line and not any(word in line for word in _CONNECTION)
        if _NOISE in line or (is_message and not _TRANSFER.search(line)):
            return False
        owned = {(a or c, b or d) for a, b, c, d in _OWNED.findall(line)}
        if owned and self.owned and not owned & self.owned:
            return False
        sorts = ((_TRANSFER, self.transfers), (_ENGINE, self.engines), (_NODE, self.nodes))
        named = ((set(sort.findall(line)), parties) for sort, parties in sorts)
        return all(not names or not parties or names & parties for names, parties in named)
