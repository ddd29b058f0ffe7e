"""The few facts of vLLM's request that the connector uses, and the router's parameters.

The router's contract is the in-engine NIXL connector's: a prefill request carries
``do_remote_decode``, its answer is handed unchanged to the decode engine, where it says
``do_remote_prefill``. The reference travels in the key ``kvxferd``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from kvxferd.client import TransferRef
from kvxferd.client.refs import read_ref
from kvxferd.wire import common

REF_KEY = "kvxferd"
_FINISHED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class Request(Protocol):
    """Of ``vllm.v1.request.Request``."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    status: Enum
    num_computed_tokens: int
    num_prompt_tokens: int


class AllocatedBlocks(Protocol):
    """Of ``vllm.v1.core.kv_cache_manager.KVCacheBlocks``."""

    def get_block_ids(self) -> tuple[Sequence[int], ...]:
        """The request's block ids, a list for each of vLLM's cache groups."""


def wants_pull(request: Request) -> bool:
    """Whether the router sent the request to decode what another engine has prefilled."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def wants_publish(request: Request) -> bool:
    """Whether another engine will decode the request."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))


def is_prompt_computed(request: Request) -> bool:
    """Whether all its prompt was computed: not aborted, not failed."""
    return request.status.name in _FINISHED


def ref_from_params(params: Mapping[str, Any]) -> common.TransferRef:
    """Return the reference that the prefill engine gave. Raises EngineError(transfer-unknown)."""
    return read_ref(params.get(REF_KEY) or {})


def params_for_decode(ref: TransferRef) -> dict[str, Any]:
    """Return the parameters that the router hands to the decode engine."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": str(ref.engine_id),
        "remote_request_id": str(ref.transfer_id),
        REF_KEY: ref.to_dict(),
    }
