"""Decides which changed settings take effect on a reload."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvxferd.config.loading import SETTINGS
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

    config: Config
    changed: list[str]  # keys that take effect
    ignored: list[str]  # keys that differ too, but need a restart


def merge_reloaded(running: Config, read: Config) -> MergedConfig:
    """Return the running configuration with the reloadable settings of the one that was read.

    Raises ConfigError if the merged settings contradict each other; then nothing may change.
    """
    differing = [key for key in SETTINGS if _value_of(running, key) != _value_of(read, key)]
    changed = [key for key in differing if key in RELOADABLE]
    sections: dict[str, Any] = {}
    for key in changed:
        section, field = key.split(".")
        before = sections.get(section, getattr(running, section))
        sections[section] = msgspec.structs.replace(before, **{field: _value_of(read, key)})
    # `replace` does not validate; the constructor does.
    fields = {name: sections.get(name, getattr(running, name)) for name in running.__struct_fields__}
    return MergedConfig(Config(**fields), changed, [key for key in differing if key not in RELOADABLE])


def _value_of(config: Config, key: str) -> Any:
    section, field = key.split(".")
    return getattr(getattr(config, section), field)
