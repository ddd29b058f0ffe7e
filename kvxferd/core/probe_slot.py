"""The one probe that a node takes part in at a time, and its mover.

The slot is free when the probe is over, no mover is being found for it, and its movers are dead. So a node
never has more of the probes' memory than one region, whatever peers send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import KillMover, RequestProbeMover, SendToMover
from kvxferd.core.limits import RETRY_LATER_S
from kvxferd.core.ucx_log import ITSELF, TransportsUsed, data_transports, is_slow_on_node
from kvxferd.errors import BusyError, Code
from kvxferd.ids import MoverId, ProbeId
from kvxferd.wire.common import Message, Refusal
from kvxferd.wire.mover import FromMover
from kvxferd.wire.probe import ProbeRead

_STEP = ("probe-step",)


class ProbeHolder(Protocol):
    """The side of a probe that has the slot."""

    def mover_ready(self) -> None:
        """Handle that the mover that was requested is here."""
        ...

    def mover_lost(self, refusal: Refusal) -> None:
        """Handle that no mover can be had, or that it has died."""
        ...

    def handle_mover_message(self, message: FromMover) -> None:
        """Handle a message of the mover."""
        ...


class ProbeSlot:
    """Who takes part in a probe, and the mover for it. A late event of a former mover is void."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._holder: ProbeHolder | None = None
        self._probe: ProbeId | None = None
        self._awaited: ProbeId | None = None  # for which a mover is being found
        self._mover: MoverId | None = None
        self._dying: set[MoverId] = set()
        self._wants_mover = False  # as soon as the former one is dead
        self._transports: list[TransportsUsed] = []

    # --- for the sides of a probe

    def acquire(self, probe: ProbeId, holder: ProbeHolder) -> None:
        """Take the slot. Raises BusyError."""
        if self._holder is not None or self._dying or self._awaited is not None:
            raise BusyError(
                "cannot probe: this daemon takes part in another probe, and there is one at a time; try "
                f"again in {RETRY_LATER_S:g} s",
                RETRY_LATER_S,
            )
        self._probe, self._holder = probe, holder

    def release(self) -> None:
        """Give the slot back. It is free when its mover is dead."""
        self.kill_mover()
        self._context.timers.cancel(_STEP)
        self._probe, self._holder, self._wants_mover = None, None, False

    def set_deadline(self, delay_s: float, on_deadline: Callable[[], None]) -> None:
        """Call that unless the next deadline is set, or the slot released, before."""
        self._context.after(_STEP, delay_s, on_deadline)

    def request_mover(self) -> None:
        """Find a mover. `mover_ready` or `mover_lost` follows."""
        assert self._probe is not None
        assert self._mover is None
        if self._dying or self._awaited is not None:
            self._wants_mover = True
            return
        self._wants_mover = False
        self._awaited = self._probe
        self._context.emit(RequestProbeMover(self._probe))

    @property
    def has_mover(self) -> bool:
        """Whether the probe has a living mover."""
        return self._mover is not None

    def send(self, message: Message) -> None:
        """Send to the mover."""
        assert self._mover is not None
        self._context.emit(SendToMover(self._mover, message))

    def kill_mover(self) -> None:
        """Kill the mover, if there is one. Its region ends with it."""
        if self._mover is not None:
            self._dying.add(self._mover)
            self._context.emit(KillMover(self._mover))
        self._mover, self._transports = None, []

    def with_transports(self, read: ProbeRead) -> ProbeRead:
        """Return the mover's result with the transports over which the mover has connected."""
        others = [used for used in self._transports if used.reach != ITSELF]
        if not others:
            return read
        itself = next((used.transports for used in self._transports if used.reach == ITSELF), ())
        last = others[-1]
        return msgspec.structs.replace(
            read,
            transports=data_transports(last.transports)[:200],
            reach=last.reach,
            is_slow=any(is_slow_on_node(itself, used.transports) for used in others if used.reach == "node"),
        )

    # --- events

    def owns(self, mover: MoverId) -> bool:
        """Whether the mover is that of a probe, maybe of a former one."""
        return mover == self._mover or mover in self._dying

    def runs_on(self, mover: MoverId) -> bool:
        """Whether the mover is that of the probe that runs."""
        return mover == self._mover

    def mover_assigned(self, probe: ProbeId, mover: MoverId) -> None:
        """Use the mover; kill it where the probe for which it was found is over."""
        if self._awaited == probe:
            self._awaited = None
        if probe != self._probe or self._mover is not None or self._holder is None:
            self._dying.add(mover)
            self._context.emit(KillMover(mover))
            return
        self._mover = mover
        self._holder.mover_ready()

    def mover_unavailable(self, probe: ProbeId, refusal: Refusal) -> None:
        """End the wait for a mover."""
        if self._awaited == probe:
            self._awaited = None
        if probe == self._probe and self._mover is None and self._holder is not None:
            self._holder.mover_lost(refusal)

    def handle_mover_message(self, mover: MoverId, message: FromMover) -> None:
        """Hand on a message of the present mover."""
        if mover == self._mover and self._holder is not None:
            self._holder.handle_mover_message(message)

    def transports_seen(self, mover: MoverId, used: TransportsUsed) -> None:
        """Note over which transports the mover has connected."""
        if mover == self._mover:
            self._transports.append(used)

    def mover_died(self, mover: MoverId) -> None:
        """Note that a mover is gone, and with it its region."""
        self._dying.discard(mover)
        if mover == self._mover:
            self._mover, self._transports = None, []
            if self._holder is not None:
                self._holder.mover_lost(Refusal(Code.MOVER_LOST, "cannot go on: the probe's mover died"))
        elif self._wants_mover and not self._dying and self._mover is None:
            self.request_mover()

    @property
    def is_free(self) -> bool:
        """Whether a probe may begin."""
        return self._holder is None and not self._dying and self._awaited is None

    @property
    def holder(self) -> ProbeHolder | None:
        """Return the side that has the slot; None: no probe runs."""
        return self._holder

    def check_integrity(self) -> None:
        """Raise AssertionError where the slot contradicts itself."""
        assert (self._holder is None) == (self._probe is None)
        assert self._mover is None or self._holder is not None, "a probe's mover outlived its probe"
        assert self._mover not in self._dying
        assert self._holder is None or _STEP in self._context.timers, "a probe has no deadline"
