"""What of a configuration that was read again may take effect at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvxferd.config.loading import SETTINGS
from kvxferd.config.schema import Config

# Allow-lists and the log's level. All else is in what is open already: sockets, movers, the core's books.
RELOADABLE = (
    "peer.curve_allowed_keys",
    "peer.allowed_addresses",
    "worker.allowed_uids",
    "worker.allowed_gids",
    "log.level",
)


class MergedConfig(NamedTuple):
    """The configuration from now on."""

    config: Config
    changed: list[str]  # keys that take effect
    ignored: list[str]  # keys that differ too, and need a restart


def merge_reloaded(running: Config, read: Config) -> MergedConfig:
    """Return the running configuration with what may change of the one that was read.

    Raises ConfigError where the two do not go together: then nothing may change.
    """
    differing = [key for key in SETTINGS if _value_of(running, key) != _value_of(read, key)]
    changed = [key for key in differing if key in RELOADABLE]
    sections: dict[str, Any] = {}
    for key in changed:
        section, field = key.split(".")
        before = sections.get(section, getattr(running, section))
        sections[section] = msgspec.structs.replace(before, **{field: _value_of(read, key)})
    # `replace` checks nothing: the constructor does.
    fields = {name: sections.get(name, getattr(running, name)) for name in running.__struct_fields__}
    return MergedConfig(Config(**fields), changed, [key for key in differing if key not in RELOADABLE])


def _value_of(config: Config, key: str) -> Any:
    section, field = key.split(".")
    return getattr(getattr(config, section), field)
