"""`kvxferd serve`: run the daemon of this node."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvxferd.config import CONFIG_PATH_VARIABLE, SETTINGS, Setting, flag_name, load_config
from kvxferd.import_blocking import block_import

with block_import("rich"):  # structlog would load it: 3 MB, for tracebacks that are JSON lines here
    from kvxferd.telemetry.logs import configure_queued_logs


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
        option = click.option(
            flag_name(setting.key), setting.key.replace(".", "__"), metavar="VALUE", help=_help(setting)
        )
        verb = option(verb)
    return verb


def _help(setting: Setting) -> str:
    # File modes are shown in octal.
    default = f"0o{setting.default:o}" if setting.field == "mode" else setting.default
    if isinstance(default, bool):
        default = str(default).lower()
    return f"{setting.expected_as_text}. Default: {default if default else 'empty'}."


@click.command()
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar=CONFIG_PATH_VARIABLE,
    help="A TOML file; config/kvxferd.toml shows every setting.",
)
@_settings_options
@click.pass_context
def serve(ctx: click.Context, /, config_path: Path | None, **flags: str | None) -> None:
    """Run the daemon until SIGTERM or `kvxferd drain`.

    Settings come from the file, then KVXFERD_SECTION_KEY in the environment, then the flags below.
    """
    # Until the daemon can reload, a SIGHUP is recorded and does not end the process.
    early: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: early.append(number))
    given = {name.replace("__", "."): text for name, text in flags.items() if text is not None}
    # A later change of the working directory or of the environment does not change what a reload reads.
    path, environ = config_path and config_path.absolute(), dict(os.environ)
    config = load_config(path, environ, given)
    open_standard_streams()
    configure_queued_logs(config.log)
    # Imported here: the other verbs need no event loop and no sockets.
    from kvxferd.daemon import serve as run_daemon

    freeze_imports()
    ctx.exit(run_daemon(config, lambda: load_config(path, environ, given), early))
