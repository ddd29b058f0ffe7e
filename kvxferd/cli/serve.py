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

with block_import("rich"):  # structlog would load it: 3 MB, for tracebacks that are lines of JSON here
    from kvxferd.telemetry.logs import configure_queued_logs


def open_standard_streams() -> None:
    """Open /dev/null as descriptors 0, 1 and 2 where they are closed.

    A socket that got such a number would be sent what libraries print.
    """
    fd = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.dup(fd)
    os.close(fd)


def freeze_imports() -> None:
    """Take what was imported out of what the garbage collector looks at: it stays until the daemon ends.

    A full collection took 48 ms of the event loop for that alone.
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
    # File modes are the one number that nobody reads in decimal.
    default = f"0o{setting.default:o}" if setting.field == "mode" else setting.default
    return f"{setting.expected_as_text}. Default: {default if default else 'empty'}."


@click.command()
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar=CONFIG_PATH_VARIABLE,
    help="TOML; config/kvxferd.toml shows every setting.",
)
@_settings_options
@click.pass_context
def serve(ctx: click.Context, /, config_path: Path | None, **flags: str | None) -> None:
    """Run the daemon until SIGTERM or `kvxferd drain`.

    Settings come from the file, then KVXFERD_SECTION_KEY in the environment, then the flags below.
    """
    # Until the daemon can reload, a SIGHUP is no reason to end: it is remembered.
    early: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: early.append(number))
    given = {name.replace("__", "."): text for name, text in flags.items() if text is not None}
    # A later working directory, or what the daemon takes out of its environment, changes no reload.
    path, environ = config_path and config_path.absolute(), dict(os.environ)
    config = load_config(path, environ, given)
    open_standard_streams()
    configure_queued_logs(config.log)
    # Here, not above: the other verbs need no event loop and no sockets.
    from kvxferd.daemon import serve as run_daemon

    freeze_imports()
    ctx.exit(run_daemon(config, lambda: load_config(path, environ, given), early))
