"""Converts the configuration to the core's settings."""

from __future__ import annotations

import os

import kvxferd
from kvxferd.config import Config
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.core.settings import Settings
from kvxferd.wire.mover import DevicePlacement, ReadWay


def settings_of(config: Config, allowlist: PeerAllowlist) -> Settings:
    """Return the settings that the core takes from the configuration."""
    return Settings(
        allowlist=allowlist,
        limits=config.limits,
        own_uid=os.geteuid(),
        ownership_s=config.worker.ownership_s,
        lease_s=config.transfer.lease_s,
        max_hold_s=config.transfer.max_hold_s,
        unknown_wait_s=config.transfer.unknown_wait_s,
        handshake_wait_s=config.peer.handshake_wait_s,
        resend_s=config.peer.request_timeout_s,
        silent_after_s=config.peer.silent_after_s,
        restart_grace_s=config.peer.restart_grace_s,
        pp_aware=config.peer.pp_aware,
        software=kvxferd.__version__,
        tracing=bool(config.tracing.endpoint),
        trace_sample_ratio=config.tracing.sample_ratio,
        mover_pool_size=config.mover.pool_size,
        read_way=ReadWay(config.mover.read),
        device_placement=DevicePlacement(config.mover.placement),
    )
