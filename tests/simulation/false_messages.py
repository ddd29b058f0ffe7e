"""Messages between daemons with a value that is not allowed, or with the last one that is, and their codes.

A row names a message, a field of it, what is there instead, and the code with which the pull then fails. One
that is only refused for the nonce, which comes last, has passed all checks before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec

from kvxferd.core.sink.grants import MAX_LEASE_S, MIN_LEASE_S
from kvxferd.errors import Code
from kvxferd.layout import validate
from kvxferd.plan.block_list_checks import MAX_TOKENS
from kvxferd.wire import limits, peer
from kvxferd.wire.peer import PEER_VERSIONS

if TYPE_CHECKING:
    from tests.simulation.kernel import Kernel

TAKEN = Code.NONCE_WRONG  # of what a reader has to know before it asks for a transfer
ARRIVES, UNHEARD = Code.COMPLETED, Code.LEASE_EXPIRED  # how a transfer ends
QUIET_S = 0.25  # in which a reply has come, however far
REQUESTS = {one.__name__ for one in get_args(peer.RequestMessage)}
NAME, LONG_NAME = "n" * limits.MAX_NAME_CHARS, "n" * (limits.MAX_NAME_CHARS + 1)


class FalseMessage(NamedTuple):
    """A message with `value`, or what that makes, at `path` ("*": in each place; "": in place of all)."""

    name: str
    path: str
    value: Any
    code: Code

    @property
    def pages_of(self) -> str:
        """What it means a whole of that comes in one reply: "" of nothing."""
        if self.name.startswith("Manifest") and self.path in ("", "num_known"):
            return "manifests"
        return "grants" if self.path.startswith("from_tokens") else ""

    @property
    def described(self) -> str:
        """What it is, for people."""
        made = "is made another" if callable(self.value) else f"is {self.value!r:.60}"
        return f"a {self.name} whose {self.path or 'kind'} {made}"

    def applied(self, payload: bytes) -> bytes:
        """Return what is sent instead of a message."""
        tree = msgspec.msgpack.decode(payload)
        if tree["t"] != self.name:
            return payload
        return msgspec.msgpack.encode(_changed(tree, [*filter(None, self.path.split("."))], self.value))


class Between:
    """What two hosts send each other, of which `false` changes something. One asks, the other replies."""

    def __init__(self, kernel: Kernel, asking: str, other: str) -> None:
        self.false: FalseMessage | None = None
        self._kernel, self._asking = kernel, asking
        self.hosts = {asking, other}
        self.open = set[int]()
        self.num_hellos = 0
        self.was_false = False  # whether a message was changed since `false` was set
        self.may_know = False  # the one that asks sent a hello at once: what was open kept what it knew
        self._heard_at = kernel.now  # what was asked before may be on its way

    def change(self, sender: str, payload: bytes) -> bytes:
        """Return what arrives of a message."""
        tree = msgspec.msgpack.decode(payload)
        if sender == self._asking and tree["t"] in REQUESTS:
            self.open.add(tree["request"])
            self.num_hellos += tree["t"] == "PeerHello"
        elif sender != self._asking and tree["t"] not in REQUESTS and tree["request"] in self.open:
            self.open.discard(tree["request"])
            self._heard_at = self._kernel.now
        changed = self.false.applied(payload) if self.false else payload
        self.was_false |= changed != payload
        return changed

    @property
    def is_quiet(self) -> bool:
        """Whether every reply has come, some time ago."""
        return not self.open and self._kernel.now >= self._heard_at + QUIET_S


def _changed(tree: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value(tree) if callable(value) else value
    key, *rest = path
    tree = {} if tree is None else tree  # its defaults are left out
    if isinstance(tree, list):
        found: Any = dict(enumerate(tree))
        places = [*found] if key == "*" else [int(key)]
    else:
        found, places = tree, [*tree] if key == "*" else [key]
    for place in places:
        found[place] = _changed(found.get(place), rest, value)
    return [*found.values()] if isinstance(tree, list) else found


def _of(name: str, prefix: str, *rows: tuple[str, Any, Code]) -> list[FalseMessage]:
    return [FalseMessage(name, prefix + path, value, code) for path, value, code in rows]


def _plus(number: int) -> Callable[[int | None], int]:
    return lambda before: (before or 0) + number


def _instead(kind: str, **fields: Any) -> Callable[[Any], Any]:
    """Return what makes a message of another kind that has the number of the one before."""
    return lambda tree: {"t": kind, "request": tree["request"], **fields}


def _with(**fields: Any) -> Callable[[Any], Any]:
    """Return what makes a message with these fields, and no more pages behind it."""
    return lambda tree: tree | fields | {"has_more": False}


def _with_ranks(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any], Any]:
    """Return what makes a manifest of other ranks: those that there are, each twice, are given to it."""

    def changed(tree: Any) -> Any:
        ranks = change([*tree["ranks"], *msgspec.msgpack.decode(msgspec.msgpack.encode(tree["ranks"]))])
        return tree | {"ranks": ranks, "num_ranks": len(ranks)}

    return changed


def _with_stages(layers_behind: int, num_layers: int, tp_size: int = 0) -> Callable[[Any], Any]:
    """Add a stage of one layer, so many layers behind the last, to a model of so many layers more."""

    def change(ranks: list[Any]) -> list[Any]:
        num = len(ranks) // 2
        last, num_stages = ranks[0]["spec"]["num_layers"], ranks[0]["spec"].get("pp_size", 1)
        added = [one for one in ranks[num:] if not one["spec"].get("pp_rank")]
        for one in added:
            one["spec"] |= {"pp_rank": num_stages}
            if tp_size:
                one["spec"] |= {"tp_size": tp_size}
            one["layout"] |= {"tensors": [], "start_layer": last + layers_behind}
            one["layout"]["end_layer"] = last + layers_behind + 1
        for one in (found := ranks[:num] + added):
            one["spec"] |= {"pp_size": num_stages + 1, "num_layers": last + num_layers}
        return found

    return _with_ranks(change)


def _with_a_rank(size_by: int, **layout: Any) -> Callable[[Any], Any]:
    """Add a rank to each stage, of another layout; the size of each is raised by so many."""

    def change(ranks: list[Any]) -> list[Any]:
        num = len(ranks) // 2
        size = ranks[0]["spec"].get("tp_size", 1)
        added = [one for one in ranks[num:] if not one["spec"].get("tp_rank")]
        for one in added:
            one["spec"] |= {"tp_rank": size}
            one["layout"] |= layout
        for one in (found := ranks[:num] + added):
            one["spec"] |= {"tp_size": size + size_by}
        return found

    return _with_ranks(change)


def _in_pieces(count: int, size: int) -> Callable[[Any], Any]:
    """Have the first region be as large as so many pieces of that size, in which it lies."""

    def change(rank: Any) -> Any:
        first = rank["binding"]["regions"][0]
        first[2], first[5] = count * size, [[count, size]]
        sizes = {one[0]: one[2] for one in rank["binding"]["regions"]}
        for one in rank["layout"]["regions"]:
            one["size_bytes"] = sizes[one["region"]]
        return rank

    return change


def _lies(at_end: int) -> Callable[[Any], Any]:
    """Have a region end so many bytes before the last address that there is."""
    return lambda region: [region[0], limits.MAX_ADDRESS - region[2] - at_end, *region[2:]]


def _pieces(make: Callable[[int], list[list[int]]]) -> Callable[[Any], Any]:
    """Have a region lie in the pieces that are made of its size."""
    return lambda region: [*region[:5], make(region[2]), *region[6:]]


MANY = limits.MAX_DESCRIPTORS_PER_RANK
REFUSALS = (Code.INTERNAL, Code.BUSY, Code.NOT_ALLOWED)
FALSE_MESSAGES = [
    *_of(
        "PeerHello", "",
        ("versions", [PEER_VERSIONS.newest + 1] * 2, Code.BAD_VERSION),
        ("versions", [PEER_VERSIONS.oldest - 1] * 2, Code.BAD_VERSION),
        ("versions", [PEER_VERSIONS.oldest - 1, PEER_VERSIONS.newest + 1], TAKEN),
        ("endpoint", "nowhere", TAKEN),
        ("more", 1, TAKEN),
    ),
    *_of(
        "PeerWelcome", "",
        ("version", PEER_VERSIONS.newest + 1, Code.BAD_VERSION),
        ("version", PEER_VERSIONS.oldest - 1, Code.BAD_VERSION),
        ("", _instead("RequestDone"), Code.BAD_FRAME),
    ),
    *_of(
        "ManifestReply", "",
        ("ranks", [], Code.BAD_FRAME),
        ("", _with_ranks(lambda ranks: ranks), Code.LAYOUT_INVALID),
        ("", _with_stages(0, 1), Code.SHAPE_MISMATCH),
        ("", _with_stages(0, 1, limits.MAX_RANKS // validate.MAX_STAGES), Code.UNEQUAL_STAGES),
        ("", _with_stages(0, 0), Code.LAYOUT_INVALID),
        ("", _with_stages(0, 2), Code.LAYERS_MISSING),
        ("", _with_stages(1, 2), Code.LAYERS_MISSING),
        ("", _with_stages(-1, 1), Code.LAYERS_MISSING),
        ("", _with_a_rank(0), Code.RANK_INVALID),
        ("", _with_a_rank(1, tensors=[], start_layer=0, end_layer=0), Code.LAYERS_MISSING),
        ("", _instead("RequestDone"), Code.BAD_FRAME),
        ("", _instead("ManifestRequest", engine_id="e", generation="g", wait_s=1.0), Code.OUT_OF_PLACE),
        *(("", _instead("PeerRefused", code=code, message=""), code) for code in REFUSALS),
    ),
    *_of(
        "ManifestReply", "ranks.*.spec.",
        ("engine_id", NAME, Code.BAD_FRAME),
        ("generation", "g0", Code.BAD_FRAME),
        ("generation", "", Code.RANK_INVALID),
        ("num_layers", 0, Code.RANK_INVALID),
        ("num_layers", _plus(1), Code.LAYERS_MISSING),
        ("num_layers", validate.MAX_LAYERS, Code.LAYERS_MISSING),
        ("num_layers", validate.MAX_LAYERS + 1, Code.RANK_INVALID),
        ("pp_size", 0, Code.RANK_INVALID),
        ("pp_size", validate.MAX_STAGES + 1, Code.RANK_INVALID),
        ("tp_size", 0, Code.RANK_INVALID),
        ("tp_size", limits.MAX_RANKS + 1, Code.RANK_INVALID),
        ("pp_rank", _plus(validate.MAX_STAGES), Code.RANK_INVALID),
        ("tp_rank", _plus(limits.MAX_RANKS), Code.RANK_INVALID),
        ("num_kv_heads", -1, Code.LAYOUT_INVALID),
        ("num_kv_heads", validate.MAX_UNITS + 1, Code.LAYOUT_INVALID),
        ("num_kv_heads", validate.MAX_UNITS, Code.SHAPE_MISMATCH),
        ("fingerprint", LONG_NAME, Code.LAYOUT_INVALID),
        ("fingerprint", NAME, Code.SHAPE_MISMATCH),
        ("home", "nowhere", Code.ENDPOINT_INVALID),
        ("more", 1, Code.BAD_FRAME),
    ),
    *_of(
        "ManifestReply", "ranks.0.",
        ("spec.pp_rank", -1, Code.RANK_INVALID),
        ("spec.tp_rank", -1, Code.RANK_INVALID),
        ("binding.metadata", bytes(limits.MAX_METADATA_BYTES + 1), Code.BAD_FRAME),
    ),
    *_of(
        "ManifestReply", "ranks.*.layout.",
        ("start_layer", -1, Code.LAYOUT_INVALID),
        ("end_layer", _plus(1 << 20), Code.LAYOUT_INVALID),
        ("tensors.*.layer", -1, Code.LAYOUT_INVALID),
        ("tensors.*.group", "none", Code.LAYOUT_INVALID),
        ("tensors.*.region", "none", Code.LAYOUT_INVALID),
        ("tensors.*.dtype", "", Code.LAYOUT_INVALID),
        ("tensors.*.dtype", NAME, Code.SHAPE_MISMATCH),
        ("tensors.*.dtype", LONG_NAME, Code.LAYOUT_INVALID),
        ("tensors.*.itemsize", 0, Code.LAYOUT_INVALID),
        ("tensors.*.block_stride", -1, Code.LAYOUT_INVALID),
        ("groups.*.num_blocks", 0, Code.LAYOUT_INVALID),
        ("regions.*.size_bytes", 0, Code.LAYOUT_INVALID),
        ("regions.*.region", "none", Code.LAYOUT_INVALID),
    ),
    *_of(
        "ManifestReply", "ranks.*.binding.",
        ("agent", "", Code.REGION_INVALID),
        ("agent", NAME, Code.BINDING_STALE),
        ("agent", LONG_NAME, Code.BAD_FRAME),
        ("incarnation", "", Code.RANK_INVALID),
        ("incarnation", NAME, TAKEN),
        ("incarnation", LONG_NAME, Code.BAD_FRAME),
        ("regions", [], Code.REGION_INVALID),
        ("regions", lambda regions: regions * 2, TAKEN),
        ("regions.0.0", "none", Code.REGION_INVALID),
        ("regions.*.1", 0, Code.REGION_INVALID),
        ("regions.*.1", 1, TAKEN),
        ("regions.*", _lies(0), TAKEN),
        ("regions.*", _lies(-1), Code.REGION_INVALID),
        ("regions.*.2", _plus(1), Code.REGION_INVALID),
        ("regions.*.2", _plus(-1), Code.REGION_INVALID),
        ("regions.*.3", -1, Code.REGION_INVALID),
        ("regions.*.3", limits.MAX_DEVICES - 1, TAKEN),
        ("regions.*.3", limits.MAX_DEVICES, Code.REGION_INVALID),
        ("regions.*.4", "DISK", Code.REGION_INVALID),
        ("regions.*", _pieces(lambda size: [[1, size]]), TAKEN),
        ("regions.*", _pieces(lambda size: [[1, size - 1]]), Code.REGION_INVALID),
        ("regions.*", _pieces(lambda size: [[1, size - 1], [1, 1]]), TAKEN),
        ("regions.*", _pieces(lambda size: [[1, size], [0, 1]]), Code.REGION_INVALID),
        ("regions.*", _pieces(lambda size: [[1, size], [1, 0]]), Code.REGION_INVALID),
        ("regions.*", _pieces(lambda size: [[1, size + 1], [1, -1]]), Code.REGION_INVALID),
    ),
    *_of(
        "ManifestReply", "",
        ("ranks.*", _in_pieces(MANY, MANY + 1), Code.SHAPE_MISMATCH),
        ("ranks.*", _in_pieces(MANY + 1, MANY), Code.REGION_INVALID),
    ),
    *_of(
        "ManifestRequest", "",
        ("engine_id", "none", Code.ENGINE_UNKNOWN),
        ("generation", "none", Code.GENERATION_STALE),
        ("num_known", -1, TAKEN),
        ("num_known", 1 << 40, Code.BAD_FRAME),
        ("wait_s", -1.0, TAKEN),
        ("", _instead("GrantsRenewed", ended=[]), Code.OUT_OF_PLACE),
        ("", _instead("RenewGrants", grants=["none"]), Code.BAD_FRAME),
    ),
    *_of(
        "GrantRequest", "",
        ("ref.nonce", "0" * 32, Code.NONCE_WRONG),
        ("ref.transfer_id", "none", Code.TRANSFER_UNKNOWN),
        ("ref.generation", "none", Code.GENERATION_STALE),
        ("from_tokens", {}, Code.TOKENS_NOT_PUBLISHED),
        ("from_tokens.*", -1, ARRIVES),
        ("from_tokens.none", 0, ARRIVES),
        ("after_tokens", 1 << 40, ARRIVES),
        ("reads.*.0", [99, 99], Code.BINDING_STALE),
        ("reads.*.1", "none", Code.BINDING_STALE),
        ("", _instead("GrantsRenewed", ended=[]), Code.OUT_OF_PLACE),
        ("", _instead("ManifestReply", boot="b", ranks=[], num_ranks=0), Code.OUT_OF_PLACE),
        ("", _instead("StillWaiting"), Code.OUT_OF_PLACE),
        ("", _instead("RenewGrants", grants=["none"]), Code.BAD_FRAME),
    ),
    *_of(
        "GrantReply", "",
        ("lease_s", math.nan, Code.BAD_FRAME),
        ("lease_s", MIN_LEASE_S, ARRIVES),
        ("lease_s", MIN_LEASE_S * 0.99, Code.BAD_FRAME),
        ("lease_s", MAX_LEASE_S, ARRIVES),
        ("lease_s", MAX_LEASE_S + 1, Code.BAD_FRAME),
        ("fence_word", lambda word: word[1:], Code.BAD_FRAME),
        ("fence_word", lambda word: word + b"0", Code.BAD_FRAME),
        ("fence_address", 0, Code.BAD_FRAME),
        ("fence_address", limits.MAX_ADDRESS - limits.FENCE_WORD_BYTES + 1, Code.BAD_FRAME),
        ("fence_agent", "", Code.BAD_FRAME),
        ("fence_agent", LONG_NAME, Code.BAD_FRAME),
        ("fence_metadata", bytes(limits.MAX_METADATA_BYTES + 1), Code.BAD_FRAME),
        ("has_more", True, Code.BAD_FRAME),
        ("", _with(blocks={}), Code.TOKENS_NOT_PUBLISHED),
        ("blocks.*.ids", lambda ids: ids[1:], Code.BAD_FRAME),
        ("blocks.*.ids", lambda ids: b"\xff\xff\xff\xff" + ids[4:], Code.BLOCKS_INVALID),
        ("blocks.*.ids", lambda ids: b"\xff\xff\xff\x7f" + ids[4:], Code.BLOCKS_INVALID),
        ("blocks.*.first_token", -1, Code.BAD_FRAME),
        ("blocks.*.first_token", MAX_TOKENS + 1, Code.BAD_FRAME),
        ("", _instead("RequestDone"), Code.BAD_FRAME),
        ("", _instead("PeerHello", versions=[1, 1], boot="b", endpoint=""), Code.OUT_OF_PLACE),
        *(("", _instead("PeerRefused", code=code, message=""), code) for code in REFUSALS),
    ),
    *_of(
        "Acknowledge", "",
        ("ref.nonce", "0" * 32, UNHEARD),
        ("ref.generation", "none", UNHEARD),
        ("ref.transfer_id", "none", UNHEARD),
        ("consumer.num_ranks", _plus(1), UNHEARD),
        ("bytes", -1, UNHEARD),
        ("bytes", 1 << 62, ARRIVES),
        ("grant", "none", ARRIVES),
    ),
]  # fmt: skip
