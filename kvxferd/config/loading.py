"""Reads the configuration: defaults, then file, environment and flags. A later source wins."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
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


def load_config(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> Config:
    """Return the configuration as `load_with_sources` does."""
    return load_with_sources(path, environ, flags).config


def load_with_sources(
    path: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]
) -> LoadedConfig:
    """Return the configuration of file, environment and flags; a later source wins.

    The keys of `flags` have the form ``transfer.lease_s``. Raises ConfigError, which names every bad key.
    """
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    problems: list[ConfigError] = []
    given = [*_from_file(path, problems)] if path is not None else []
    num_from_file = len(given)
    given += _from_environment(environ, problems)
    given += _from_flags(flags, problems)
    for number, (key, value, source) in enumerate(given):
        try:
            setting = find_setting(key, source)
            expected = setting.expected if number < num_from_file else setting.expected_as_text
            converted = convert_value(setting, value, source, expected)
        except ConfigError as error:
            problems.append(error)
        else:
            values.setdefault(setting.section, {})[setting.field] = converted
            sources[key] = source
    _raise_all(problems)
    sections = {f.name: f.type(**values.get(f.name, {})) for f in msgspec.structs.fields(Config)}
    return LoadedConfig(Config(**sections), sources)


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


def read_file(path: Path) -> str:
    """Return the text of a configuration file. Raises ConfigError if it cannot be read or is no text."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}; mend it, or name another "
            f"with --config or {CONFIG_PATH_VARIABLE}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the configuration {path}: it is not TOML: {error}") from error


def unknown_table(name: str, source: str) -> ConfigError:
    """Return the error for a table, or a key outside of tables, that is no section of the configuration."""
    sections = {key.partition(".")[0] for key in SETTINGS}
    return ConfigError(f"cannot use {name} of {source}: the tables there are {', '.join(sorted(sections))}")


def _raise_all(problems: Sequence[ConfigError]) -> None:
    """Raise one error for all of them: a person who mends a configuration wants to see every reason."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        listed = "".join(f"\n  {problem.message}" for problem in problems)
        raise ConfigError(f"cannot use the configuration, for {len(problems)} reasons:{listed}")


def _from_file(path: Path, problems: list[ConfigError]) -> Iterator[tuple[str, Any, str]]:
    """Yield the keys of a file; tables that there are not are problems."""
    text = read_file(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cannot read the configuration {path}: it is not TOML: {error}") from error
    sections = {key.partition(".")[0] for key in SETTINGS}
    for section, table in document.items():
        if section not in sections or not isinstance(table, dict):
            problems.append(unknown_table(section, str(path)))
            continue
        for field, value in table.items():
            yield f"{section}.{field}", value, str(path)


def _from_environment(
    environ: Mapping[str, str], problems: list[ConfigError]
) -> Iterator[tuple[str, Any, str]]:
    keys = {setting.variable: setting.key for setting in SETTINGS.values()}
    for name, text in sorted(environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or name == CONFIG_PATH_VARIABLE:
            continue
        if name in keys:
            yield from _parsed(keys[name], text, name, problems)
        elif not _SERVICE_LINK.fullmatch(name):
            problems.append(
                ConfigError(
                    f"cannot use {name} from the environment: no setting has that name; "
                    f"names are {ENVIRONMENT_PREFIX}SECTION_KEY, such as KVXFERD_TRANSFER_LEASE_S"
                )
            )


def _from_flags(flags: Mapping[str, str], problems: list[ConfigError]) -> Iterator[tuple[str, Any, str]]:
    for key, text in flags.items():
        yield from _parsed(key, text, f"flag {flag_name(key)}", problems)


def _parsed(key: str, text: str, source: str, problems: list[ConfigError]) -> Iterator[tuple[str, Any, str]]:
    """Yield the key with its value, unless that is a problem."""
    try:
        yield key, _parse_text(key, text, source), source
    except ConfigError as error:
        problems.append(error)


def find_setting(key: str, source: str) -> Setting:
    """Return the setting of that key. Raises ConfigError, which lists the section's keys."""
    if key in SETTINGS:
        return SETTINGS[key]
    section = key.partition(".")[0]
    known = [s.field for s in SETTINGS.values() if s.section == section]
    raise ConfigError(
        f"cannot use {key} from {source}: no setting has that name; [{section}] has {', '.join(known)}"
    )


def _parse_text(key: str, text: str, source: str) -> Any:
    """Return the text of a variable or flag as the value that a TOML file would hold."""
    setting = find_setting(key, source)
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


def convert_value(setting: Setting, value: Any, source: str, expected: str) -> Any:
    """Return the value as the setting's type. Raises ConfigError with key, source and a valid form."""
    try:
        return msgspec.convert(value, setting.type)
    except msgspec.ValidationError as error:
        raise _invalid_value(setting, value, source, expected) from error


def _invalid_value(setting: Setting, value: object, source: str, expected: str) -> ConfigError:
    # Somebody may have given the key itself in place of the file's path, or a password to the movers.
    shown = "" if setting.may_hold_secrets else f" = {value!r}"
    return ConfigError(f"cannot use {setting.key}{shown} from {source}: give {expected}")
