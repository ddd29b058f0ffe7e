"""One grant that a local rank holds, or requests: where it is, and which moves are legal."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.core.ranks.movers import RemoteMetadata
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.ids import GrantId, GroupName, PullId
from kvxferd.layout import BlocksByGroup
from kvxferd.plan import PlannedReads
from kvxferd.wire.common import Refusal, TransferRef
from kvxferd.wire.mover import SourceRank
from kvxferd.wire.peer import GrantReply


class GrantState(StrEnum):
    """The steps from a handshake to a grant that is held."""

    HANDSHAKING = "handshake"
    PLANNING = "plan"
    REQUESTING = "grant"
    HELD = "held"
    LAPSED = "lapsed"  # the source has ended it; a pull that is not posted requests another
    REFUSED = "refused"
    ENDED = "ended"  # its pull has


class GrantTrigger(StrEnum):
    """What happens to a grant."""

    LEARN = "learn"  # the engine's manifest is here
    PLAN = "plan"
    GRANT = "grant"  # by the source
    STALE = "stale"  # the source's movers are others than the manifest names
    LAPSE = "lapse"
    REPEAT = "repeat"  # it is asked for once more, with the manifest and plan as they are now
    REFUSE = "refuse"
    END = "end"


# A pair that is not in the table is a bug.
TRANSITIONS: dict[tuple[GrantState, GrantTrigger], GrantState] = {
    (GrantState.HANDSHAKING, GrantTrigger.LEARN): GrantState.PLANNING,
    (GrantState.HANDSHAKING, GrantTrigger.REFUSE): GrantState.REFUSED,
    (GrantState.PLANNING, GrantTrigger.PLAN): GrantState.REQUESTING,
    (GrantState.PLANNING, GrantTrigger.REFUSE): GrantState.REFUSED,
    (GrantState.REQUESTING, GrantTrigger.GRANT): GrantState.HELD,
    (GrantState.REQUESTING, GrantTrigger.STALE): GrantState.HANDSHAKING,
    (GrantState.REQUESTING, GrantTrigger.REFUSE): GrantState.REFUSED,
    (GrantState.HELD, GrantTrigger.LAPSE): GrantState.LAPSED,
    (GrantState.HELD, GrantTrigger.REPEAT): GrantState.HANDSHAKING,
    (GrantState.LAPSED, GrantTrigger.REPEAT): GrantState.HANDSHAKING,
} | {(state, GrantTrigger.END): GrantState.ENDED for state in GrantState if state is not GrantState.ENDED}


NO_PULL = PullId(0)  # of a grant that is prepared
UNSETTLED = (GrantState.HANDSHAKING, GrantState.PLANNING, GrantState.REQUESTING)


@dataclass(slots=True)
class HeldGrant:
    """A grant that one local rank holds, or requests, on one transfer."""

    grant_id: GrantId
    rank: LocalRank
    ref: TransferRef
    wait_s: float
    started_at: float
    state: GrantState = GrantState.HANDSHAKING
    learn_by: float = 0.0  # until when its source may wait for the engine's missing ranks
    learnt_at: float = 0.0  # when the engine's manifest arrived, or was known already
    settled_at: float = 0.0  # when the grant arrived, or was refused
    remote: RemoteEngine | None = None
    reads: PlannedReads | None = None
    granted: GrantReply | None = None  # the last reply, without its ids
    sources: tuple[SourceRank, ...] = ()  # what a mover gets with each pull, of what is granted
    agents: list[RemoteMetadata] = field(default_factory=list)  # and what it gets before
    starts: dict[GroupName, int] | None = None  # the first token of each list of the pull; None: no pull yet
    blocks: BlocksByGroup = field(default_factory=dict)  # the source's, as far as they are here
    refusal: Refusal | None = None
    refused_in: str = ""  # which phase ended with the refusal: "handshake", "plan" or "grant"
    num_stale_bindings: int = 0
    charged_bytes: int = 0  # that the source's block ids take of the rank's user's share
    pull: PullId = NO_PULL  # that reads with it
    asked: int = 0  # the number of the last `GrantRequest`; 0: none was sent, or it is of no interest now
    after_tokens: int = -1  # of a progressive pull: the tokens that it has; -1: it wants all at once
    awaits_more: bool = False  # it is held, and more tokens were asked for
    more_refusal: Refusal | None = None  # why the source will have no more

    def transition(self, trigger: GrantTrigger) -> None:
        """Move to the next state. A KeyError is a bug of the caller."""
        self.state = TRANSITIONS[self.state, trigger]
