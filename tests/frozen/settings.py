"""Configuration keys: types, limits, defaults, and their names in the environment and as flags."""

from __future__ import annotations

import asyncio
import stat
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from kvxferd.config import CONFIG_PATH_VARIABLE, RELOADABLE, SETTINGS, flag_name, load_config
from kvxferd.control.ownership_file import OwnershipFile
from kvxferd.core.rank_holders import SavedRank
from kvxferd.ids import EngineId
from kvxferd.integrations.vllm.options import Options
from kvxferd.run_directory import RunDirectory
from tests.frozen.shapes import example_of, struct_of, type_of
from tests.frozen.tree import ROOT


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
        "run directory": _run_directory(),
    }


def _run_directory() -> dict[str, Any]:
    """Return every path below node.run_dir with its mode, and what the file of owners holds."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "run")
        sockets = load_config(None, {}, {"node.run_dir": str(place)})
        run_directory = RunDirectory(place, sockets.worker.socket)
        try:
            kept = example_of(types.type_info(SavedRank), "rank")
            listed = (((EngineId("prefill-0"), 1000),), (kept,))
            ownerships = OwnershipFile(run_directory.ownership_path, lambda: listed)
            asyncio.run(_write(ownerships))
            paths = sorted(place.rglob("*"))
            return {
                "worker.socket": str(Path(sockets.worker.socket).relative_to(place)),
                "control.socket": str(Path(sockets.control.socket).relative_to(place)),
                "files": {p.relative_to(place).as_posix(): stat.filemode(p.lstat().st_mode) for p in paths},
                "owners": {
                    "path": run_directory.ownership_path.relative_to(place).as_posix(),
                    "text": run_directory.ownership_path.read_text(),
                },
            }
        finally:
            run_directory.close()


async def _write(ownerships: OwnershipFile) -> None:
    ownerships.save_soon()
    await ownerships.close()
