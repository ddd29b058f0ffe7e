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
        transfer=config.transfer,
        peer=config.peer,
        worker=config.worker,
        limits=config.limits,
        tracing=config.tracing,
        allowlist=allowlist,
        own_uid=os.geteuid(),
        software=kvxferd.__version__,
        mover_pool_size=config.mover.pool_size,
        read_way=ReadWay(config.mover.read),
        device_placement=DevicePlacement(config.mover.placement),
    )
