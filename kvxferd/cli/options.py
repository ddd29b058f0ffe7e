"""Options that several verbs have.

`kvxferd serve` has some of them: what other verbs need more than it is imported where it is used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from kvxferd.cli.completion import complete_files

F = TypeVar("F", bound=Callable[..., Any])

# As `kvxferd.config` has it, which a completion need not load; a test compares them.
CONFIG_PATH_VARIABLE = "KVXFERD_CONFIG"

DEFAULT_INTERVAL_S = 2.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 86_400.0

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
form_option = click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(("table", "wide", "json", "name")),
    default="table",
    show_default=True,
    help="The columns that fit, all columns, one JSON object, or the names in the first table alone.",
)


def _socket_at(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    from kvxferd.tooling.control_client import control_socket_path

    return path and control_socket_path(path)


socket_option = click.option(
    "--socket",
    "socket_path",
    metavar="PATH",
    callback=_socket_at,
    shell_complete=complete_files,
    help="The daemon's control socket, or the directory with it.",
)


def config_option(text: str) -> Callable[[F], F]:
    """Return the option that names the configuration file, with its help."""
    return click.option(
        "--config",
        "config_path",
        metavar="FILE",
        type=click.Path(path_type=Path),
        envvar=CONFIG_PATH_VARIABLE,
        help=text,
    )


def with_control_client(verb: F) -> F:
    """Add the options that name a daemon, and pass its client as the verb's first argument."""

    @socket_option
    @config_option("The daemon's configuration file, which names the socket.")
    @functools.wraps(verb)
    def run_verb(socket_path: str | None, config_path: Path | None, **options: Any) -> Any:
        from kvxferd.config import load_config
        from kvxferd.tooling.control_client import ControlClient

        path = socket_path or load_config(config_path, os.environ, {}).control.socket
        return verb(ControlClient(path), **options)

    return run_verb  # type: ignore[return-value]


def watchable(verb: F) -> F:
    """Add `--watch`, which runs a verb that shows something again and again."""

    @click.option(
        "--watch",
        "interval_s",
        metavar="[SECONDS]",
        type=click.FloatRange(MIN_INTERVAL_S, MAX_INTERVAL_S),
        is_flag=False,
        flag_value=DEFAULT_INTERVAL_S,
        help=f"Show it again every so many seconds, {DEFAULT_INTERVAL_S:g} by default, until Ctrl-C.",
    )
    @functools.wraps(verb)
    def run_verb(*arguments: Any, interval_s: float | None, **options: Any) -> None:
        if interval_s is None:
            verb(*arguments, **options)
            return
        if options.get("follow"):
            raise click.UsageError("--follow goes on by itself: leave --watch out")
        if not interval_s >= MIN_INTERVAL_S:  # not a number, which no range excludes
            raise click.BadParameter("give a number of seconds", param_hint="--watch")
        from kvxferd.tooling.watch import watch

        def show() -> None:
            with suppress(click.exceptions.Exit):  # with a status, which would end the watch
                verb(*arguments, **options)

        as_json = options.get("as_json", False) or options.get("form") == "json"
        watch(click.get_current_context().command_path, show, interval_s, as_json)

    return run_verb  # type: ignore[return-value]
