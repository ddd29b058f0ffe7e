"""A wait for an event ends at its deadline, whatever the descriptor reports."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvxferd import client
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.engine_process import EventWaiter


class FakeRank:
    """A rank whose descriptor is a pipe's, and whose events are given."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        self.events: list[client.Event] = []

    def fileno(self) -> int:
        return self.reads

    def poll(self) -> list[client.Event]:
        events, self.events = self.events, []
        return events


@pytest.fixture
def rank() -> Iterator[Any]:
    rank = FakeRank()
    yield rank
    os.close(rank.reads)
    os.close(rank.writes)


@pytest.mark.parametrize("readable", [False, True])
def test_no_event_is_an_error_at_the_deadline(rank: Any, readable: bool) -> None:
    if readable:
        os.write(rank.writes, b"x")  # which no event follows
    with pytest.raises(KvxferdError) as raised:
        EventWaiter(rank).next_event(time.monotonic() + 0.05)
    assert raised.value.code is Code.DEADLINE


def test_an_event_that_is_there_is_returned_after_the_deadline_too(rank: Any) -> None:
    rank.events = [client.PublishRefused("a", Code.NOT_FOUND, "")]
    assert EventWaiter(rank).next_event(time.monotonic() - 1) == client.PublishRefused(
        "a", Code.NOT_FOUND, ""
    )
