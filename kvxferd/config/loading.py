"""Reads the configuration: defaults, then file, environment and flags. A later source wins."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

import msgspec

from kvxferd.config.schema import Config
from kvxferd.config.types import Environment, FileMode, KeyFile, Networks, NumericIds, PublicKeys
from kvxferd.errors import ConfigError
from kvxferd.redaction import HIDDEN, is_secret_name

ENVIRONMENT_PREFIX = "KVXFERD_"
# The path of the file, for `kvxferd serve`: the only KVXFERD_ name that is not a setting.
CONFIG_PATH_VARIABLE = "KVXFERD_CONFIG"
# Kubernetes puts these into every container beside a Service called kvxferd or kvxferd-something.
_SERVICE_LINK = re.compile(
    r"KVXFERD(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

# Types whose form in a flag or variable differs from that in the file.
_TEXT_FORMS = (
    (NumericIds, "numeric ids, separated by commas"),
    (PublicKeys, "public keys of 64 hex digits, separated by commas, or any"),
    (Networks, "networks such as 10.0.0.0/16, separated by commas"),
    (Environment, "NAME=text,NAME=text; a text with a comma has to be set in the file"),
)


class Setting(NamedTuple):
    """One key of the configuration, as file, environment and flags name it."""

    section: str
    field: str
    type: Any
    default: Any

    @property
    def key(self) -> str:
        """The key as messages name it: ``transfer.lease_s``."""
        return f"{self.section}.{self.field}"

    @property
    def variable(self) -> str:
        """The environment variable's name."""
        return f"{ENVIRONMENT_PREFIX}{self.section}_{self.field}".upper()

    @property
    def may_hold_secrets(self) -> bool:
        """Whether a value, a wrong one included, may contain a secret, so that messages do not repeat it."""
        return self.type is KeyFile or self.type is Environment

    @property
    def expected(self) -> str:
        """The form of a valid value in the file."""
        return next(m.title for m in self.type.__metadata__ if isinstance(m, msgspec.Meta) and m.title)

    @property
    def expected_as_text(self) -> str:
        """The form of a valid value in a flag or variable."""
        return next((text for kind, text in _TEXT_FORMS if kind is self.type), self.expected)


def _all_settings() -> Iterator[Setting]:
    for section in msgspec.structs.fields(Config):
        # Not `section.type`'s own fields: msgspec strips the annotations that carry `title`.
        types = get_type_hints(section.type, include_extras=True)
        for field in msgspec.structs.fields(section.type):
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            yield Setting(section.name, field.name, types[field.name], default)


SETTINGS: Mapping[str, Setting] = {setting.key: setting for setting in _all_settings()}


class LoadedConfig(NamedTuple):
    """A configuration, and where its settings come from."""

    config: Config
    sources: Mapping[str, str] = MappingProxyType({})  # by key, of those that are given: a path, a variable


class _Found:
    """What the sources give, later ones over earlier ones, and what is wrong with it."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {}  # by section and field, each of its setting's type
        self.sources: dict[str, str] = {}
        self.problems: list[str] = []

    def add(self, key: str, value: Any, source: str, *, is_text: bool = False) -> None:
        """Take over a setting. `is_text`: the value is as variables and flags have it, not as TOML has it."""
        try:
            setting = _find_setting(key, source)
            expected = setting.expected_as_text if is_text else setting.expected
            given = _parse_text(setting, value, source) if is_text else value
            converted = _convert_value(setting, given, source, expected)
        except ConfigError as error:
            self.problems.append(error.message)
        else:
            self.values.setdefault(setting.section, {})[setting.field] = converted
            self.sources[key] = source


def load_config(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> Config:
    """Return the configuration as `load_with_sources` does."""
    return load_with_sources(path, environ, flags).config


def load_with_sources(
    path: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]
) -> LoadedConfig:
    """Return the configuration of file, environment and flags; a later source wins.

    The keys of `flags` have the form ``transfer.lease_s``. Raises ConfigError, which names every bad key.
    """
    found = _Found()
    if path is not None:
        _add_file(path, found)
    _add_environment(environ, found)
    for key, text in flags.items():
        found.add(key, text, f"flag {flag_name(key)}", is_text=True)
    if len(found.problems) == 1:
        raise ConfigError(found.problems[0])
    if found.problems:
        # A person who mends a configuration wants to see every reason.
        listed = "".join(f"\n  {message}" for message in found.problems)
        raise ConfigError(f"cannot use the configuration, for {len(found.problems)} reasons:{listed}")
    sections = msgspec.structs.fields(Config)
    given = {section.name: section.type(**found.values.get(section.name, {})) for section in sections}
    return LoadedConfig(Config(**given), found.sources)


def settings_in_effect(loaded: LoadedConfig) -> dict[str, dict[str, Any]]:
    """Return each setting's value, without the texts of secrets, and its source, which may be "default"."""
    return {
        key: {"value": shown_value(getattr(getattr(loaded.config, setting.section), setting.field)),
              "source": loaded.sources.get(key, "default")}
        for key, setting in SETTINGS.items()
    }  # fmt: skip


def shown_value(value: Any) -> Any:
    """Return a setting's value as JSON has it; in a table, texts with a secret's name are hidden."""
    plain = msgspec.to_builtins(value)
    if not isinstance(plain, dict):
        return plain
    return {name: HIDDEN if is_secret_name(name) else text for name, text in plain.items()}


def flag_name(key: str) -> str:
    """Return the flag of `kvxferd serve` that sets a key: ``--transfer-lease-s``."""
    return "--" + key.replace(".", "-").replace("_", "-")


def _add_file(path: Path, found: _Found) -> None:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}; mend it, or name another "
            f"with --config or {CONFIG_PATH_VARIABLE}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the configuration {path}: it is not TOML: {error}") from error

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found.problems.append(f"cannot read the configuration {path}: it is not TOML: {error}")
        return
    sections = {setting.section for setting in SETTINGS.values()}
    for section, table in document.items():
        if section not in sections or not isinstance(table, dict):
            listed = ", ".join(sorted(sections))
            found.problems.append(f"cannot use {section} of {path}: the tables there are {listed}")
            continue
        for field, value in table.items():
            found.add(f"{section}.{field}", value, str(path))


def _add_environment(environ: Mapping[str, str], found: _Found) -> None:
    keys = {setting.variable: setting.key for setting in SETTINGS.values()}
    for name, text in sorted(environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or name == CONFIG_PATH_VARIABLE:
            continue
        if name in keys:
            found.add(keys[name], text, name, is_text=True)
        elif not _SERVICE_LINK.fullmatch(name):
            problem = (
                f"cannot use {name} from the environment: no setting has that name; "
                f"names are {ENVIRONMENT_PREFIX}SECTION_KEY, such as KVXFERD_TRANSFER_LEASE_S"
            )
            found.problems.append(problem)


def _find_setting(key: str, source: str) -> Setting:
    """Return the setting of that key. Raises ConfigError, which lists the section's keys."""
    if key in SETTINGS:
        return SETTINGS[key]
    section = key.partition(".")[0]
    known = [s.field for s in SETTINGS.values() if s.section == section]
    raise ConfigError(
        f"cannot use {key} from {source}: no setting has that name; [{section}] has {', '.join(known)}"
    )


def _parse_text(setting: Setting, text: str, source: str) -> Any:
    """Return the text of a variable or flag as the value that a TOML file would hold."""
    try:
        if setting.type is FileMode:
            return int(text, 8)  # "660", "0660" and "0o660" alike
        if setting.type is NumericIds:
            return [int(part) for part in text.split(",") if part.strip()]
        if setting.type in (PublicKeys, Networks):
            return [part.strip() for part in text.split(",") if part.strip()]
        if setting.type is Environment:
            pairs = [part.partition("=") for part in text.split(",") if part.strip()]
            if any(not separator for _, separator, _ in pairs):
                raise ValueError("a pair without '='")
            return {name.strip(): value for name, _, value in pairs}
        return msgspec.convert(text, setting.type, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise _invalid_value(setting, text, source, setting.expected_as_text) from error


def _convert_value(setting: Setting, value: Any, source: str, expected: str) -> Any:
    """Return the value as the setting's type. Raises ConfigError with key, source and a valid form."""
    try:
        return msgspec.convert(value, setting.type)
    except msgspec.ValidationError as error:
        raise _invalid_value(setting, value, source, expected) from error


def _invalid_value(setting: Setting, value: object, source: str, expected: str) -> ConfigError:
    # Somebody may have given the key itself in place of the file's path, or a password to the movers.
    shown = "" if setting.may_hold_secrets else f" = {value!r}"
    return ConfigError(f"cannot use {setting.key}{shown} from {source}: give {expected}")
