"""Probes of the way between two daemons, of both sides: events in, to whichever side has the slot."""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.events import ProbeMoverAssigned, ProbeMoverUnavailable
from kvxferd.core.peers import Peers
from kvxferd.core.probe_client import ProbeClient
from kvxferd.core.probe_server import ProbeServer
from kvxferd.core.probe_slot import ProbeSlot
from kvxferd.errors import Code, KvxferdError


class PeerProbes:
    """The slot for one probe, and the two sides that may have it."""

    def __init__(self, context: NodeContext, peers: Peers) -> None:
        self._context = context
        self.slot = ProbeSlot(context)
        self.client = ProbeClient(context, self.slot, peers)
        self.server = ProbeServer(context, self.slot)

    def handle_mover_found(self, event: ProbeMoverAssigned | ProbeMoverUnavailable) -> None:
        """Handle the reply to `RequestProbeMover`."""
        if isinstance(event, ProbeMoverAssigned):
            self.slot.mover_assigned(event.probe, event.mover)
        else:
            self.slot.mover_unavailable(event.probe, event.refusal)

    def drain(self) -> None:
        """End the probe that runs: a drain waits for no probe."""
        self._cancel(Code.DRAINING, "a daemon that takes part in it drains")

    def allowlist_changed(self) -> None:
        """End the probe that runs if its peer is not admitted any more."""
        try:
            if (endpoint := self.client.endpoint) is not None:
                self._context.allowlist.check(endpoint)
        except KvxferdError as error:
            self.client.cancel(error.code, error.message)
        key = self.server.key  # "": a peer without one, which lists of keys do not admit
        if key is not None and not self._context.allowlist.allows_key(key):
            self.server.cancel(Code.NOT_ALLOWED, "the requesting daemon's key is not admitted any more")

    def check_integrity(self) -> None:
        """Raise AssertionError where a side and the slot contradict each other."""
        self.slot.check_integrity()
        runs = [side for side in (self.client, self.server) if side.is_running]
        assert runs == ([] if self.slot.holder is None else [self.slot.holder]), (
            "the slot is not its holder's"
        )

    def _cancel(self, code: Code, why: str) -> None:
        self.client.cancel(code, why)
        self.server.cancel(code, why)
