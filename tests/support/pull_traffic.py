"""Pulls that go on in a thread while a test does other things."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, publish


class PullTraffic:
    """Publishes at one rank and pulls at another, again and again, until it is closed.

    `survives`: exceptions that fail one request, and do not end the traffic. `more`: of the pulls.
    """

    def __init__(
        self,
        source: RankProcess,
        sink: RankProcess,
        pause_s: float = 0.1,
        survives: tuple[type[Exception], ...] = (),
        **more: Any,
    ) -> None:
        self.count_anew()
        self.after_publish: Callable[[int, dict[str, Any]], None] = lambda request, ref: None
        self.lock = threading.Lock()  # held while a request runs: the ranks take one call at a time
        self._source, self._sink = source, sink
        self._pause_s, self._survives, self._more = pause_s, survives, more
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def count_anew(self) -> None:
        self.num_delivered = 0
        self.num_wrong = 0  # items of what was delivered
        self.slowest_s = 0.0
        self.failures: list[dict[str, Any]] = []

    @property
    def num_ended(self) -> int:
        return self.num_delivered + len(self.failures)

    def close(self) -> None:
        """End after the pull that runs. Raises what ended the thread before."""
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a pull never ends"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        request = 0
        try:
            while not self._over.wait(self._pause_s):
                request += 1
                with self.lock:
                    self._pull(request)
        except BaseException as error:
            self._error = error

    def _pull(self, request: int) -> None:
        with suppress(*self._survives):  # a source that cannot publish is not read
            ref = publish([self._source], request)
            self.after_publish(request, ref)
            ids, began = ids_for(1000 + request), time.monotonic()
            try:
                ticket = self._sink.pull(ref, ids, TOKENS, **self._more)
                name, fields = self._sink.end_of(ticket)
            except self._survives as error:
                name, fields = "Failed", {"error": error}
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            if name == "Delivered":
                self.num_wrong += self._sink.num_wrong(request, ids, TOKENS)
                self.num_delivered += 1
            else:
                self.failures.append(fields)
