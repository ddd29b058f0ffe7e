"""`kvxferd serve`: run the daemon of this node."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from kvxferd.cli.options import config_option
from kvxferd.config import SETTINGS, flag_name, load_with_sources
from kvxferd.die_with_parent import die_with_parent
from kvxferd.import_blocking import block_import


def open_standard_streams() -> None:
    """Open /dev/null as descriptors 0, 1 and 2 where they are closed.

    A socket with such a number would receive what libraries print.
    """
    fd = os.open(os.devnull, os.O_RDWR)  # the lowest free number
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.dup(fd)
    os.close(fd)


def freeze_imports() -> None:
    """Exclude imported objects from garbage collection: they stay until the daemon ends.

    A full collection of them alone took 48 ms of the event loop.
    """
    gc.collect()
    gc.freeze()


def _settings_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(list(SETTINGS.values())):
        option = click.option(flag_name(setting.key), setting.key.replace(".", "__"), hidden=True)
        verb = option(verb)
    return verb


@click.command()
@config_option("A TOML file; `kvxferd config defaults` prints one with every setting.")
@_settings_options
@click.option("--parent-pid", type=int, hidden=True, help="Of a tool that starts it, with which it ends.")
@click.pass_context
def serve(
    ctx: click.Context, /, config_path: Path | None, parent_pid: int | None, **flags: str | None
) -> None:
    """Run the daemon until SIGTERM or `kvxferd drain`.

    Settings come from the file, then from KVXFERD_TRANSFER_LEASE_S and the like in the environment, then
    from flags such as --transfer-lease-s 20. `kvxferd config defaults` prints all of them, with reasons.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid, signal.SIGTERM)
    # Until the daemon can reload, a SIGHUP waits and does not end the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    given = {name.replace("__", "."): text for name, text in flags.items() if text is not None}
    # A later change of the working directory or of the environment does not change what a reload reads.
    path, environ = config_path and config_path.absolute(), dict(os.environ)
    loaded = load_with_sources(path, environ, given)
    open_standard_streams()
    # Imported here: a completion needs the options alone, and the other verbs no event loop and no sockets.
    import_logs().configure_queued_logs(loaded.config.log)
    from kvxferd.daemon import serve as run_daemon

    freeze_imports()
    ctx.exit(run_daemon(loaded, lambda: load_with_sources(path, environ, given), str(path or "")))


def import_logs() -> ModuleType:
    """Import `kvxferd.telemetry.logs`, before the daemon's modules import structlog."""
    with block_import("rich"):  # structlog would load it: 3 MB, for tracebacks that are JSON lines here
        return importlib.import_module("kvxferd.telemetry.logs")
