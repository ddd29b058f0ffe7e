"""An engine of two nodes, and the keys of its home and its member."""

from __future__ import annotations

import msgspec

from kvxferd.errors import Code
from kvxferd.ids import EngineId, EngineKey, Generation, Rank
from kvxferd.wire.common import Message
from kvxferd.wire.peer import PeerRefused

MEMBER_KEY, STRANGER_KEY = "0a" * 32, "0b" * 32


KEY, SECOND = EngineKey(EngineId("prefill"), Generation("g1")), Rank(1, 0)


def second(spec):
    return msgspec.structs.replace(spec, pp_rank=1)


def is_not_allowed(reply: Message) -> bool:
    return isinstance(reply, PeerRefused) and reply.code is Code.NOT_ALLOWED
