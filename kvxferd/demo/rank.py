"""A rank of one of the demo's engines: it writes and publishes requests, or pulls and checks them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvxferd import client
from kvxferd.errors import KvxferdError
from kvxferd.tooling import content
from kvxferd.tooling.content import BlockIds, ContentCheck, RequestBlocks
from kvxferd.tooling.engine_process import EngineRank, Pulled


@dataclass(frozen=True)
class RankResult:
    """One rank's pull of one request, and the check of its whole memory."""

    elapsed_s: float  # of the pull, also of one that failed
    pulled: Pulled | None  # None: it failed
    failure: str  # message and code, where it failed
    check: ContentCheck
    spilled_bytes: int  # changed outside the pulled blocks


class DemoRank(EngineRank):
    """See the module."""

    def prefill(self, name: str, request: RequestBlocks, publish: bool) -> client.TransferRef | None:
        """Write the request; publish it if this rank is to, and report that the rank is ready."""
        self.write(request)
        ref = self.publish(name, request) if publish else None
        self.ready(name)
        return ref

    def pull_and_check(self, ref: client.TransferRef, request: RequestBlocks, damage: str = "") -> RankResult:
        """Pull the request, then check the whole memory. `damage` corrupts one byte in between."""
        before = self.store.bytes.copy()
        began, pulled = time.monotonic(), None
        failure = ""
        try:
            pulled = self.pull(ref, request)
        except KvxferdError as error:
            failure = f"{error.message} [{error.code.value}]"
        elapsed_s = time.monotonic() - began
        if damage:
            self._corrupt_byte(damage, request.ids)
        spilled = content.count_changed_outside(before, self.store.bytes, self.layout, request.ids)
        check = self.check(request) if pulled else ContentCheck(0, 0, "")
        return RankResult(elapsed_s, pulled, failure, check, spilled)

    def _corrupt_byte(self, what: str, ids: Mapping[str, BlockIds]) -> None:
        """Corrupt one byte, to show that the check finds it: of a pulled block ("item"), or of another."""
        view = next(content.block_views(self.store.bytes, self.layout))
        own = ids[self.layout.groups[0].name].tolist()
        view[own[0] if what == "item" else min(set(range(len(view))) - set(own)), 0, 0, 0, 0] ^= 0xFF
