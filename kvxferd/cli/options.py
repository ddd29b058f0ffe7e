"""Options that several verbs have.

`kvxferd serve` has some of them: what other verbs need more than it is imported where it is used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvxferd.config import CONFIG_PATH_VARIABLE

F = TypeVar("F", bound=Callable[..., Any])

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
