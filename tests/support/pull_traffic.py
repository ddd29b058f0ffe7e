"""Pulls that go on in a thread while a test does other things."""

from __future__ import annotations

import threading
from typing import Any

from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, publish


class PullTraffic:
    """Publishes at one rank and pulls at another, again and again, until it is closed."""

    def __init__(self, source: RankProcess, sink: RankProcess, pause_s: float = 0.1, **more: Any) -> None:
        self.num_delivered = 0
        self.failures: list[dict[str, Any]] = []
        self._source, self._sink = source, sink
        self._pause_s, self._more = pause_s, more
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End after the pull that runs. Raises what ended the thread before."""
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            request = 0
            while not self._over.wait(self._pause_s):
                request += 1
                ref = publish([self._source], request)
                ticket = self._sink.pull(ref, ids_for(1000 + request), TOKENS, **self._more)
                name, fields = self._sink.end_of(ticket)
                if name == "Delivered":
                    self.num_delivered += 1
                else:
                    self.failures.append(fields)
        except BaseException as error:
            self._error = error
