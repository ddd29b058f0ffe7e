"""Options that several verbs have."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvxferd.config import CONFIG_PATH_VARIABLE, load_config
from kvxferd.tooling.control_client import ControlClient

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def with_control_client(verb: F) -> F:
    """Add the options that name a daemon, and pass its client as the verb's first argument."""

    @click.option("--socket", "socket_path", metavar="PATH", help="The daemon's control socket.")
    @click.option(
        "--config",
        "config_path",
        metavar="FILE",
        type=click.Path(path_type=Path),
        envvar=CONFIG_PATH_VARIABLE,
        help="The daemon's configuration file, which names the socket.",
    )
    @functools.wraps(verb)
    def run_verb(socket_path: str | None, config_path: Path | None, **options: Any) -> Any:
        path = socket_path or load_config(config_path, os.environ, {}).control.socket
        return verb(ControlClient(path), **options)

    return run_verb  # type: ignore[return-value]
