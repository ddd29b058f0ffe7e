"""The operator's settings: one frozen `Config`, read once from file, environment and flags.

A later source wins: defaults, then the TOML file, then `KVXFERD_SECTION_KEY` in the environment, then
flags. An unknown key or a value out of range is refused with the key's name, its source and a valid form;
nothing is guessed and nothing is ignored.
"""

from kvxferd.config.loading import (
    CONFIG_PATH_VARIABLE,
    SETTINGS,
    LoadedConfig,
    Setting,
    flag_name,
    load_config,
    load_with_sources,
    settings_in_effect,
    shown_value,
)
from kvxferd.config.reloading import RELOADABLE, MergedConfig, merge_reloaded
from kvxferd.config.schema import (
    ANY_KEY,
    Config,
    LimitsConfig,
    LogConfig,
    MoverConfig,
    PeerConfig,
    TransferConfig,
    WorkerConfig,
)
from kvxferd.config.types import split_endpoint, split_host_port

__all__ = [
    "ANY_KEY",
    "CONFIG_PATH_VARIABLE",
    "RELOADABLE",
    "SETTINGS",
    "Config",
    "LimitsConfig",
    "LoadedConfig",
    "LogConfig",
    "MergedConfig",
    "MoverConfig",
    "PeerConfig",
    "Setting",
    "TransferConfig",
    "WorkerConfig",
    "flag_name",
    "load_config",
    "load_with_sources",
    "merge_reloaded",
    "settings_in_effect",
    "shown_value",
    "split_endpoint",
    "split_host_port",
]
