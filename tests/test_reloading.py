"""Which settings a reload changes, which it names, and what it refuses."""

from __future__ import annotations

import pytest

from kvxferd.config import RELOADABLE, SETTINGS, Config, load_config, merge_reloaded
from kvxferd.errors import ConfigError

KEY = "ab" * 32


def config(**settings: str) -> Config:
    return load_config(None, {}, {name.replace("__", "."): text for name, text in settings.items()})


def test_every_reloadable_setting_is_one() -> None:
    assert set(RELOADABLE) <= set(SETTINGS)


def test_lists_and_the_level_change_and_the_rest_is_named() -> None:
    running = config(worker__allowed_uids="1", http__bind="127.0.0.1:1")
    read = config(worker__allowed_uids="2", log__level="debug", http__bind="127.0.0.1:2")
    merged = merge_reloaded(running, read)
    assert merged.changed == ["worker.allowed_uids", "log.level"]
    assert merged.ignored == ["http.bind"]
    assert merged.config == config(worker__allowed_uids="2", log__level="debug", http__bind="127.0.0.1:1")


def test_the_same_again_is_nothing() -> None:
    assert merge_reloaded(config(), config()) == (config(), [], [])


def test_what_does_not_go_together_with_the_running_key_is_refused_whole() -> None:
    running = config(peer__curve_secret_key_file="/k", peer__curve_allowed_keys=KEY)
    with pytest.raises(ConfigError, match="nobody would be let in"):
        merge_reloaded(running, config(log__level="debug"))
