"""A connector for vLLM that exchanges a handshake and moves nothing: a sibling inside MultiConnector.

vLLM loads it by its module path. Like NixlConnector it takes every pipeline stage's metadata and refuses
metadata that is not its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

_LOG = init_logger("vllm.handshaking")


@dataclass
class OwnHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker of this connector sends."""


class HandshakingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Does nothing beyond its handshake."""

    ranks: tuple[tuple[int, int], ...] = ()  # (pp_rank, tp_rank) of the workers whose handshake came

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return OwnHandshake()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for rank, sent in metadata.items():
            if not isinstance(sent, OwnHandshake):
                raise ValueError(f"rank {rank} sent a {type(sent).__name__}, which is not mine")
        self.ranks = tuple(sorted(metadata))
        _LOG.info("handshake of ranks %s", self.ranks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None
