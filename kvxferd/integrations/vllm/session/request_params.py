"""The fields of vLLM's request that the connector uses, and the router's parameters.

The router's contract is the in-engine NIXL connector's: a prefill request has ``do_remote_decode``, and
the router passes the parameters of its response, which have ``do_remote_prefill``, unchanged to the
decode engine. The key ``kvxferd`` has the transfer's reference. The key ``traceparent``, which a router
may add, has the header of that name: vLLM reads it from a request by itself only while it exports traces.

A router that asks both engines at once chooses the transfer's id and nonce, and gives both the same reference
with the key ``kvxferd_overlap``: the prefill engine is to publish it, and for the decode engine it may not be
there yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from kvxferd.client import TransferRef
from kvxferd.wire.traceparent import read_traceparent

REF_KEY = "kvxferd"
OVERLAP_KEY = "kvxferd_overlap"
TRACEPARENT_KEY = "traceparent"
_FINISHED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class Request(Protocol):
    """The fields of ``vllm.v1.request.Request`` that the connector reads."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    status: Enum
    num_computed_tokens: int
    num_prompt_tokens: int

    def get_skip_reading_prefix_cache(self) -> bool:
        """Whether vLLM computes the whole prompt, cached or not: its log probabilities are asked for."""


class AllocatedBlocks(Protocol):
    """The method of ``vllm.v1.core.kv_cache_manager.KVCacheBlocks`` that the connector calls."""

    def get_block_ids(self) -> tuple[Sequence[int], ...]:
        """Return the request's block ids, a list for each of vLLM's cache groups."""


def traceparent_of(request: Request) -> str:
    """Return the traceparent of the request's trace; "" where it has none that is valid.

    vLLM keeps the header in `trace_headers` while it exports traces itself (`--otlp-traces-endpoint`);
    otherwise a router passes it with the parameters.
    """
    headers = getattr(request, "trace_headers", None)
    found = headers.get("traceparent") if isinstance(headers, Mapping) else None
    return read_traceparent(found) or read_traceparent(
        (request.kv_transfer_params or {}).get(TRACEPARENT_KEY)
    )


def wants_pull(request: Request) -> bool:
    """Whether another engine has prefilled the request and this one is to decode it."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def wants_publish(request: Request) -> bool:
    """Whether this engine is to prefill the request and another will decode it."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))


def has_router_ref(request: Request) -> bool:
    """Whether the reference was made by a router that asks both engines at once."""
    return (request.kv_transfer_params or {}).get(OVERLAP_KEY) is True


def is_prompt_computed(request: Request) -> bool:
    """Whether the whole prompt was computed: the request was neither aborted nor failed before that."""
    return request.status.name in _FINISHED


def is_left_to_router(request: Request) -> bool:
    """Whether the request ended with an error, as under the policy "fail" where its cache was not loaded.

    Its router may send it to another decode engine with the same reference. Who aborts it wants it no more.
    """
    return request.status.name == "FINISHED_ERROR"


def ref_from_params(params: Mapping[str, Any]) -> TransferRef:
    """Return the prefill engine's, or the router's, reference. Raises EngineError(transfer-unknown)."""
    return TransferRef.parse(params.get(REF_KEY) or {})


def params_for_decode(ref: TransferRef) -> dict[str, Any]:
    """Return the parameters that the router passes to the decode engine."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": str(ref.engine_id),
        "remote_request_id": str(ref.transfer_id),
        REF_KEY: ref.to_dict(),
    }
