"""Converts the configuration to the core's settings."""

from __future__ import annotations

import os

from kvxferd.config import Config
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.core.limits import Limits
from kvxferd.core.settings import Settings


def settings_of(config: Config, allowlist: PeerAllowlist) -> Settings:
    """Return the settings that the core takes from the configuration."""
    return Settings(
        allowlist=allowlist,
        limits=Limits(
            max_ranks=config.limits.max_ranks,
            max_transfers_per_engine=config.limits.max_transfers_per_engine,
            max_pulls_per_rank=config.limits.max_pulls_per_rank,
            max_inflight_bytes=config.limits.max_inflight_bytes,
            max_peers=config.limits.max_peers,
            max_waiting_per_peer=config.limits.max_waiting_per_peer,
            max_waiting=config.limits.max_waiting,
        ),
        own_uid=os.geteuid(),
        ownership_s=config.worker.ownership_s,
        lease_s=config.transfer.lease_s,
        max_hold_s=config.transfer.max_hold_s,
        unknown_wait_s=config.transfer.unknown_wait_s,
        handshake_wait_s=config.peer.handshake_wait_s,
        resend_s=config.peer.request_timeout_s,
        silent_after_s=config.peer.silent_after_s,
    )
