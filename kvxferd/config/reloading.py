"""Decides which changed settings take effect on a reload."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvxferd.config.loading import SETTINGS, LoadedConfig
from kvxferd.config.schema import Config

# Allow-lists and the log's level. All other settings are already used by open sockets, movers and the core.
RELOADABLE = (
    "peer.curve_allowed_keys",
    "peer.curve_allowed_keys_file",
    "peer.allowed_addresses",
    "worker.allowed_uids",
    "worker.allowed_gids",
    "log.level",
)


class MergedConfig(NamedTuple):
    """The configuration after a reload."""

    loaded: LoadedConfig
    changed: list[str]  # keys that take effect
    ignored: list[str]  # keys that differ too, but need a restart


def merge_reloaded(running: LoadedConfig, read: LoadedConfig) -> MergedConfig:
    """Return the running configuration with the reloadable settings of the one that was read.

    Raises ConfigError if the merged settings contradict each other; then nothing may change.
    """
    config = running.config
    differing = [key for key in SETTINGS if _value_of(config, key) != _value_of(read.config, key)]
    changed = [key for key in differing if key in RELOADABLE]
    sections: dict[str, Any] = {}
    for key in changed:
        section, field = key.split(".")
        before = sections.get(section, getattr(config, section))
        sections[section] = msgspec.structs.replace(before, **{field: _value_of(read.config, key)})
    # `replace` does not validate; the constructor does.
    fields = {name: sections.get(name, getattr(config, name)) for name in config.__struct_fields__}
    sources = {key: source for key, source in running.sources.items() if key not in RELOADABLE}
    sources |= {key: source for key, source in read.sources.items() if key in RELOADABLE}
    ignored = [key for key in differing if key not in RELOADABLE]
    return MergedConfig(LoadedConfig(Config(**fields), sources), changed, ignored)


def _value_of(config: Config, key: str) -> Any:
    section, field = key.split(".")
    return getattr(getattr(config, section), field)
