"""Configuration keys: types, limits, defaults, and their names in the environment and as flags."""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec
from msgspec import inspect as types

from frozen.shapes import struct_of, type_of
from frozen.tree import ROOT
from kvxferd.config import CONFIG_PATH_VARIABLE, RELOADABLE, SETTINGS, flag_name
from kvxferd.integrations.vllm.options import Options


def surface() -> dict[str, Any]:
    """Return every key of the daemon's file and of vLLM's `kv_connector_extra_config`."""
    example = tomllib.loads((ROOT / "config" / "kvxferd.toml").read_text())
    return {
        "keys": {
            key: {
                "type": type_of(types.type_info(setting.type)),
                "default": msgspec.to_builtins(setting.default),
                "variable": setting.variable,
                "flag": flag_name(key),
                "reloadable": key in RELOADABLE,
            }
            for key, setting in SETTINGS.items()
        },
        "variable of the file's path": CONFIG_PATH_VARIABLE,
        "keys of the example file": sorted(
            f"{section}.{key}" for section, table in example.items() for key in table
        ),
        "kv_connector_extra_config": struct_of(Options)["fields"],
    }
