"""The home's side of engines that span nodes: the ranks that other daemons join, and their requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReplyToPeer
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import MEMBER_BYTES
from kvxferd.core.peers.manifest_checks import LayoutCache, check_manifest, check_spec
from kvxferd.core.peers.remote_engine import RANK_BYTES
from kvxferd.core.peers.requests import OpenRequest, PeerRequests
from kvxferd.core.ranks.owners import daemon_owner, is_user
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.ranks.rank import LocalRank, MemberRank, OnRankChange, RankChange
from kvxferd.core.ranks.registry import Registry
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import AgentName, EngineId, EngineKey, Rank
from kvxferd.layout import EngineSpec
from kvxferd.wire.common import RankManifest
from kvxferd.wire.outlines import JoinRankOutline, ManifestOutline
from kvxferd.wire.peer import (
    JoinRank,
    LeaveRank,
    PeerRefused,
    RankPollingRequest,
    RankReady,
    RequestDone,
    refusal_of,
)


def _peer_id(record: MemberRank) -> str:
    """Return the peer that the rank counts for: its CURVE key, or without keys its connection."""
    return record.key or record.route.hex()


def _refusal(spec: EngineSpec, why: str, code: Code, retry_after_s: float = 0.0) -> EngineError:
    text = f"cannot take rank {spec.rank} of engine {spec.key}: {why}"
    return EngineError(text, code, retry_after_s=retry_after_s)


class Home:
    """Ranks of this node's engines whose workers are connected to other nodes' daemons."""

    def __init__(
        self,
        context: NodeContext,
        registry: Registry,
        peer_requests: PeerRequests,
        layout_cache: LayoutCache,
        on_change: OnRankChange,
        poll_requests: PollRequests,
    ) -> None:
        self._context = context
        self._registry = registry
        self._peer_requests = peer_requests
        self._layout_cache = layout_cache
        self._on_change = on_change
        self._poll_requests = poll_requests
        self._members: dict[AgentName, MemberRank] = {}
        self._member_share = context.ledger[MEMBER_BYTES]  # by `_peer_id`
        self._owners = registry.owners

    def join(self, route: bytes, message: JoinRank, key: str) -> None:
        """Add a member's rank, or refresh it. The first daemon that joins a rank owns it."""
        spec, owner = message.manifest.spec, daemon_owner(key, message.secret)
        present = self.find_member(spec.key, spec.rank)
        if (
            present is not None
            and owner == present.owner
            and (present.boot, present.joined) == (message.boot, message.manifest)
        ):
            present.request = max(present.request, message.request)
            self._refresh_heartbeat(present, route)  # the usual case: nothing is checked again
            self._reply_to_join(present, route, message)
            return
        try:
            # The sender is checked before the layout, which takes much longer.
            self._check_sender(message, key, owner, present, route)
            joined = check_manifest(message.manifest, self._layout_cache)
            record = MemberRank(joined, route, message.boot, key, owner, message.request, self._context.now)
            record.added_by = message.request if present is None else 0
            more = record.num_bytes - (present.num_bytes if present else 0)
            self._member_share.check(_peer_id(record), more, "take one more rank of another node")
            self._registry.check_claim(record, present)
        except KvxferdError as error:
            self._context.emit(ReplyToPeer(route, refusal_of(message.request, error)))
            return
        self._registry.claim(record)
        if present is not None:
            self._members.pop(present.agent, None)
            self._uncount(present)
            self._peer_requests.reroute(present.route, record.route)
        self._members[record.agent] = record
        self._member_share.add(_peer_id(record), record.num_bytes)
        self._owners.set_present(spec.key, spec.rank, owner)
        self._refresh_heartbeat(record, route)
        if present is None or present.incarnation != record.incarnation:
            self._on_change(RankChange.MAPPED, record)
        self._reply_to_join(record, route, message)
        self._on_change(RankChange.READY, record)

    def _reply_to_join(self, record: MemberRank, route: bytes, message: JoinRank) -> None:
        is_new, polls = message.request == record.added_by, self._poll_requests.is_requested(record.agent)
        done = RequestDone(request=message.request, is_new=is_new, polls=polls)
        self._context.emit(ReplyToPeer(route, done))

    def refusal_of_join(self, route: bytes, message: JoinRankOutline, key: str) -> PeerRefused | None:
        """Return why the rank cannot be joined, before its layout is decoded; None: the layout decides."""
        spec, owner = message.manifest.spec, daemon_owner(key, message.secret)
        try:
            self._check_sender(message, key, owner, self.find_member(spec.key, spec.rank), route)
        except KvxferdError as error:
            return refusal_of(message.request, error)
        return None

    def _check_sender(
        self,
        message: JoinRank | JoinRankOutline,
        key: str,
        owner: str,
        present: MemberRank | None,
        route: bytes,
    ) -> None:
        """Raise KvxferdError where this daemon may not join this rank here."""
        manifest = message.manifest
        spec = check_spec(manifest.spec, manifest.binding.incarnation)
        if spec.home != self._context.endpoint:
            why = f"its home is {spec.home or 'elsewhere'}, and this is {self._context.endpoint}"
            raise _refusal(spec, why, Code.NOT_HOME)
        self._check_agent(manifest)
        self._check_order(message, owner, present)
        if present is not None:
            self._check_owner(message, key, owner, present)
            return
        self._member_share.check(key or route.hex(), RANK_BYTES, "take one more rank of another node")
        self._check_absent_owner(spec, owner)
        if self._registry.get(spec.key) is None:
            self._check_generation(spec, owner)

    def _check_order(
        self, message: JoinRank | JoinRankOutline, owner: str, present: MemberRank | None
    ) -> None:
        """Raise EngineError where the same daemon has sent a later request about the rank.

        Delayed on a former connection, the earlier one would bring back a mover or a generation that is gone.
        """
        spec = message.manifest.spec
        row = self._owners.find(spec.key, spec.rank)
        last = row.last_request if row is not None and row.owner == owner else None
        if present is not None and owner == present.owner:
            last = present.boot, present.request
        if last is not None and message.boot == last[0] and message.request < last[1]:
            raise _refusal(spec, "a later request is in its place", Code.CANCELLED)

    def _check_owner(
        self, message: JoinRank | JoinRankOutline, key: str, owner: str, present: MemberRank
    ) -> None:
        """Raise EngineError where another daemon, or another mapping, owns the rank.

        A rank belongs to the daemon that joined it first until that daemon leaves it or is gone. A restarted
        daemon has another boot, and without CURVE another secret. Only its silence shows that the former
        daemon is gone. Silence is no proof, so with another key the rank stays refused until it expires
        (`tombstone_s`).
        """
        may_speak = owner == present.owner
        incarnation = message.manifest.binding.incarnation
        if may_speak and (message.boot == present.boot or incarnation == present.incarnation):
            return
        if (key or present.key) and not may_speak:
            raise _refusal(present.spec, "it was joined with another CURVE key", Code.NOT_ALLOWED)
        left_s = present.last_seen_at + self._context.settings.member_silent_after_s - self._context.now
        if left_s > 0:
            why = (
                f"another {'mapping' if may_speak else 'daemon'} of it is there; it may be taken "
                f"{left_s:.1f} s from now, if nothing is heard of that one until then"
            )
            code = Code.RANK_TAKEN if may_speak else Code.NOT_ALLOWED
            raise _refusal(present.spec, why, code, left_s)

    def _check_absent_owner(self, spec: EngineSpec, owner: str) -> None:
        """Raise EngineError where an absent rank is kept for its last owner, maybe from before a restart."""
        row = self._owners.find_absent(spec.key, spec.rank)
        if row is None or row.owner == owner:
            return
        left_s = self._owners.left_s(row)
        whose = "a worker of this node" if is_user(row.owner) else "the daemon that joined it"
        why = f"it is kept for {whose}, for {left_s:.0f} s more or until `kvxferd disown`"
        raise _refusal(spec, why, Code.NOT_ALLOWED, min(left_s, self._context.settings.member_heartbeat_s))

    def _check_generation(self, spec: EngineSpec, owner: str) -> None:
        """Raise EngineError where this daemon may not start a generation of the engine.

        The first rank of a generation supersedes all older ones. So only the owner of the engine may join
        it: the user of its ranks on this node, or the daemon that joined all its ranks. Another daemon waits
        until the others' ranks have left or belong to the new generation.
        """
        if why := self._why_not_started_by(spec, owner):
            remedy = "start it on its home first, wait until the former one has ended, or choose another id"
            retry_after_s = self._context.settings.member_heartbeat_s
            raise _refusal(spec, f"{why}; {remedy}", Code.NOT_ALLOWED, retry_after_s)

    def _why_not_started_by(self, spec: EngineSpec, owner: str) -> str:
        """Return why this daemon may not start that generation; "" where it may."""
        for engine in self._registry.generations_of(spec.engine_id):
            for record in engine.ranks.values():
                if isinstance(record, LocalRank):
                    return f"{engine.key} is here, and a worker of this node is its rank {record.spec.rank}"
                if owner != record.owner:
                    return f"{engine.key} is here, and its rank {record.spec.rank} is another daemon's"
        if self._owners.awaits_worker(spec.key):
            return "workers of this node were its ranks, and may be back"
        row = self._owners.find(spec.key, spec.rank)
        is_own = row is not None and row.owner == owner
        if not is_own and self._owners.awaits_daemon(spec.engine_id, owner):
            return "its ranks are kept for the daemons that joined them"
        return ""

    def _refresh_heartbeat(self, record: MemberRank, route: bytes) -> None:
        """Record a heartbeat. If it came by another route, open requests move to that route.

        Without one for `tombstone_s` its node is gone, and sends no `LeaveRank`.
        """
        record.last_seen_at = self._context.now
        if record.route != route:
            self._peer_requests.reroute(record.route, route)
            self._uncount(record)
            record.route = route
            self._member_share.add(_peer_id(record), record.num_bytes)
        self._context.after(
            ("member", record.spec.key, record.spec.rank),
            self._context.settings.tombstone_s,
            lambda: self._forget([record]),
        )

    def _check_agent(self, manifest: RankManifest | ManifestOutline) -> None:
        spec, other = manifest.spec, self._members.get(manifest.binding.agent)
        if other is not None and (other.spec.key, other.spec.rank) != (spec.key, spec.rank):
            why = f"its agent is that of rank {other.spec.rank} of engine {other.spec.key}"
            raise _refusal(spec, why, Code.RANK_TAKEN)

    def _remove(self, record: MemberRank) -> None:
        self._members.pop(record.agent, None)
        self._uncount(record)
        self._context.timers.cancel(("member", record.spec.key, record.spec.rank))
        self._on_change(RankChange.GONE, record)
        # A member that joins again is asked anew: it may have been told to stop, or be another process.
        self._poll_requests.forget(record.agent)
        self._registry.remove(record)

    def charges(self) -> Iterator[Charge]:
        """Yield what the members' manifests are counted for."""
        return ((MEMBER_BYTES, _peer_id(record), record.num_bytes) for record in self._members.values())

    def _uncount(self, record: MemberRank) -> None:
        self._member_share.release(_peer_id(record), record.num_bytes)

    def num_silent(self, engine_id: EngineId) -> int:
        """Return how many joined ranks of the engine are silent."""
        return len(self._silent_members(engine_id))

    def disown(self, engine_id: EngineId) -> None:
        """Remove the engine's silent ranks, as those of a lost node, at the operator's request."""
        self._forget(self._silent_members(engine_id))

    def _forget(self, lost: Collection[MemberRank]) -> None:
        """Remove ranks of daemons that are gone, and keep none for its owner."""
        for record in lost:
            self._remove(record)
            self._owners.forget(record.spec.key, record.spec.rank)

    def _silent_members(self, engine_id: EngineId) -> list[MemberRank]:
        records = [r for engine in self._registry.generations_of(engine_id) for r in engine.ranks.values()]
        return [r for r in records if isinstance(r, MemberRank) and self._registry.is_silent(r)]

    def find_member(self, key: EngineKey, rank: Rank) -> MemberRank | None:
        """Return a rank that another daemon has joined; None: there is none."""
        engine = self._registry.get(key)
        record = engine.ranks.get(rank) if engine else None
        return record if isinstance(record, MemberRank) else None

    def leave(self, route: bytes, message: LeaveRank, key: str) -> None:
        """Remove a member's rank. A late `LeaveRank` removes nothing that was joined after it was sent."""
        engine = EngineKey(message.engine_id, message.generation)
        present = self.find_member(engine, message.rank)
        if present is not None and not self._is_of_owner(present, route, message, key):
            return
        if present is not None and present.boot == message.boot and present.request < message.request:
            self._remove(present)
            present = None
        if present is None:  # or it has left while this daemon was away
            owner, request = daemon_owner(key, message.secret), (message.boot, message.request)
            self._owners.rank_left(engine, message.rank, owner, request)
        self._context.emit(ReplyToPeer(route, RequestDone(request=message.request)))

    def _is_of_owner(
        self, present: MemberRank, route: bytes, message: LeaveRank | RankReady, key: str
    ) -> bool:
        """Whether the sender has joined the rank. Another sender is refused, and nothing changes."""
        if daemon_owner(key, message.secret) == present.owner:
            return True
        text = (
            f"cannot speak for rank {message.rank} of engine {present.spec.key}: another daemon has joined it"
        )
        refused = PeerRefused(request=message.request, code=Code.NOT_ALLOWED, message=text)
        self._context.emit(ReplyToPeer(route, refused))
        return False

    def reporting_member(self, route: bytes, message: RankReady, key: str) -> MemberRank | None:
        """Return the rank that a member reports; None: another daemon's, which is refused, or none yet.

        Its mover was replaced, or this daemon restarted: the report is sent again once the rank has joined.
        """
        present = self.find_member(EngineKey(message.engine_id, message.generation), message.rank)
        return present if present and self._is_of_owner(present, route, message, key) else None

    def request_polling(self, agent: AgentName) -> None:
        """Have a member's mover poll. It stops where the reply to a heartbeat does not say that it is to."""
        if member := self._members.get(agent):
            message = RankPollingRequest(request=self._peer_requests.next_id(), agent=agent)
            timeout_s = self._context.settings.peer.silent_after_s
            self._peer_requests.send(OpenRequest(member.route, message, timeout_s, key=member.key))
