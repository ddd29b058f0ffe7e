"""A wait for an event ends at its deadline, whatever the descriptor reports."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from kvxferd import client
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.engine_process import EventWaiter


class Rank:
    """A rank whose descriptor and events are given."""

    def __init__(self, fd: int, *events: client.Event) -> None:
        self._fd = fd
        self.events = list(events)

    def fileno(self) -> int:
        return self._fd

    def poll(self) -> list[client.Event]:
        events, self.events = self.events, []
        return events


@pytest.mark.parametrize("is_readable", [False, True])
def test_no_event_is_an_error_at_the_deadline(is_readable: bool) -> None:
    reads, writes = os.pipe()
    rank: Any = Rank(reads)
    if is_readable:
        os.write(writes, b"x")  # which no event follows
    with pytest.raises(KvxferdError) as raised:
        EventWaiter(rank).next_event(time.monotonic() + 0.05)
    assert raised.value.code is Code.DEADLINE
    rank.events = [refused := client.PublishRefused("a", Code.NOT_FOUND, "")]
    assert EventWaiter(rank).next_event(time.monotonic() - 1) == refused, "what is there comes late, too"
    os.close(reads)
    os.close(writes)
