"""`kvxferd config`: the sample configuration, the check of a file, and the settings in effect."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from kvxferd.cli.options import config_option, json_option, socket_option
from kvxferd.config import SETTINGS, Setting, load_with_sources, settings_in_effect, shown_value
from kvxferd.config.sample import sample_text
from kvxferd.errors import ConfigError
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.exit_codes import EXIT_INVALID
from kvxferd.tooling.output import plain_text, print_json, print_table, tuple_columns


@click.group()
def config() -> None:
    """Print the sample configuration, check a file, or show the settings in effect."""


@config.command()
@json_option
def defaults(as_json: bool) -> None:
    """Print a configuration file with every setting, its default, its unit and the reason for it.

    With --json: the defaults alone. An empty path or address stands for one that follows from others.
    """
    if as_json:
        values = {key: shown_value(setting.default) for key, setting in SETTINGS.items()}
        print_json(values, has_version=False)
        return
    click.echo(sample_text(), nl=False)


@config.command()
@json_option
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path, as_json: bool) -> None:
    """Check a configuration file: each bad key, and what to do.

    The file alone is read: neither the environment nor the files of keys that it names. Exit status: 0 if
    its settings are valid; 1 if the daemon would refuse one; 2 if there is no such file.
    """
    if not file.is_file():
        raise ConfigError(f"cannot check {file}: there is no such file; give the configuration's path")
    problem = ""
    try:
        load_with_sources(file, {}, {})
    except ConfigError as error:
        problem = error.message
    if as_json:
        print_json({"file": str(file), "valid": not problem, "problem": problem})
    else:
        for line in (problem or f"{file}: valid").splitlines():
            click.echo(plain_text(line).plain)
    if problem:
        click.get_current_context().exit(EXIT_INVALID)


@config.command()
@json_option
@socket_option
@config_option("The daemon's configuration file.")
@click.option("--here", is_flag=True, help="Ask no daemon: read the file and the environment.")
def show(as_json: bool, socket_path: str | None, config_path: Path | None, here: bool) -> None:
    """Show the settings of this node's daemon, and where each comes from.

    The source is a flag, a variable, the file, or the default. Of secrets the path is shown, never the
    content. With --here: those that a daemon started here, now and without flags, would have.
    """
    loaded = load_with_sources(config_path, os.environ, {})
    if here:
        shown: dict[str, Any] = {
            "file": str(config_path) if config_path else None,
            "settings": settings_in_effect(loaded),
        }
    else:
        shown = ControlClient(socket_path or loaded.config.control.socket).get("/v1/config")
    if as_json:
        print_json(shown)
        return
    settings = shown["settings"]
    rows = [(key, _to_text(SETTINGS[key], one["value"]), one["source"]) for key, one in settings.items()]
    print_table("Settings", tuple_columns("key", "value", "from"), rows)


def _to_text(setting: Setting, value: Any) -> str:
    """Return the value as the file has it."""
    return f"0o{value:o}" if setting.field == "mode" else msgspec.json.encode(value).decode()
