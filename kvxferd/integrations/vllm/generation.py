"""The agreement of one engine's workers before they register: its generation, and whether it needs ready."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvxferd.ids import Generation
from kvxferd.integrations.common.agreement import gather_from_ranks


def start_tag(vllm_config: Any) -> str:
    """Return what every process of one start of the engine has in common, and no other start on this node.

    vLLM names each start by its time in nanoseconds, and passes that name to the workers of the scheduler's
    node. "" for a vLLM without it.
    """
    name = str(getattr(vllm_config, "instance_id", ""))
    return hashlib.blake2s(name.encode(), digest_size=4).hexdigest() if name else ""


def agree_on_generation(tag: str, needs_ready: bool) -> tuple[Generation, bool]:
    """Return the engine's generation, which its first rank chooses, and whether any rank needs ready.

    The generation begins with the first rank's `tag` (`start_tag`), so that the scheduler, which shares it,
    can tell its own engine from another start that the daemon has. Every worker of the engine calls this
    once; it blocks until all have.
    """
    gathered = gather_from_ranks((get_tp_group(), get_pp_group()), (tag + secrets.token_hex(8), needs_ready))
    return Generation(gathered[0][0]), any(needs for _, needs in gathered)
