"""An engine's scheduler: it has no memory, and publishes what the engine's ranks have written."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from kvxferd import client
from kvxferd.errors import KvxferdError
from tests.support.cluster.rank_agent import GROUP, Agent, Birth


class Scheduler:
    """Driven as `Agent` is. Each method but `serve` is a command of the runner."""

    def __init__(self, pipe: Connection, birth: Birth) -> None:
        self._pipe = pipe
        self._say("born", os.getpid(), 0)
        self._publisher = self._attach(birth)

    def _say(self, *message: Any) -> None:
        self._pipe.send(message)

    def _attach(self, birth: Birth) -> client.Publisher:
        began = time.monotonic()
        while True:
            try:
                self._client = client.connect(birth.socket, name="chaos")
                try:
                    publisher = self._client.attach(birth.spec.engine_id, birth.spec.generation)
                except KvxferdError:
                    self._client.close()
                    raise
            except KvxferdError as error:
                self._say("refused", str(error.code), error.message)
                time.sleep(0.1)
                continue
            self._say("registered", time.monotonic() - began)
            return publisher

    def serve(self) -> None:
        while True:
            for ready in wait([self._pipe, self._publisher.fileno()]):
                if ready is self._pipe:
                    name, *args = self._pipe.recv()
                    getattr(self, name)(*args)
            for event in self._publisher.poll():
                self._take(event)

    # --- commands

    def publish(self, name: str, ids: list[int], tokens: int, lease_s: float) -> None:
        blocks = {GROUP: client.BlockList(first_token=0, ids=np.array(ids, np.int32))}
        try:
            ref = self._publisher.publish(name, blocks, tokens, lease_s=lease_s)
        except KvxferdError as error:
            self._say("released", name, str(error.code))
            return
        self._say("published", name, ref.to_dict())

    def unpublish(self, ref: dict[str, Any]) -> None:
        self._publisher.unpublish(ref)

    # --- events

    def _take(self, event: client.Event) -> None:
        match event:
            case client.Released():
                self._say("released", event.transfer_id, str(event.why))
            case client.PublishRefused():
                self._say("released", event.transfer_id, str(event.code))
            case client.Disconnected():
                self._say("disconnected", str(event.code), event.message)


def run(pipe: Connection, birth: Birth) -> None:
    """A worker process's main function; ends when the runner is gone."""
    try:
        (Scheduler if birth.is_scheduler else Agent)(pipe, birth).serve()
    except (EOFError, ConnectionError):
        os._exit(0)
