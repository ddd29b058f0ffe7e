"""Parses an engine argument: a preset with keys, a file, or an engine that is registered in the daemon."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvxferd.errors import ConfigError, KvxferdError
from kvxferd.ids import Digest, Rank
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.layout.presets import (
    DeploymentOptions,
    ModelFacts,
    deploy,
    find_model,
    key_and_value,
    with_kv_dtype,
)
from kvxferd.layout.presets.model_facts import LayerKind
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import check_engine, digest_of_layouts
from kvxferd.tooling.control_client import ControlClient

# The dtypes of cached keys and values, and their bytes.
_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
_DTYPE_SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}

# Sixteen times the largest engine that we know of; a plan for each of its ranks takes 10 ms.
MAX_ENGINE_RANKS = 1024

_INTEGER_KEYS = ("tp", "pp", "block_tokens", "num_blocks", "cp", "interleave", "page_bytes")
_TEXT_KEYS = ("layout", "kv_dtype", "stages", "pages", "draft")
_USAGE = (
    "an engine is described by PRESET[,key=value...] (as in 'llama-3-70b,tp=8,pp=2,layout=HND'), by a "
    ".json or .toml file, or by @ENGINE_ID for one that is live in the daemon"
)


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model and the options that an engine is deployed with."""

    model: ModelFacts
    options: DeploymentOptions

    def ranks(self) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
        """Return spec and layout of every rank. Raises ValueError for options that do not suit the model."""
        return deploy(self.model, self.options)

    def takes_layout(self, layout: str) -> bool:
        """Whether the kernels of the model, and of its draft model, take a layout."""
        draft = self.options.draft
        return self.model.takes_layout(layout) and (draft is None or draft.takes_layout(layout))

    def with_options(self, options: Mapping[str, Any]) -> Deployment:
        """Return the deployment with some other options. Raises ValueError as DeploymentOptions does."""
        return Deployment(self.model, dataclasses.replace(self.options, **options))


@dataclasses.dataclass(frozen=True)
class EngineDescription:
    """One described engine, with every rank checked."""

    label: str  # as the user wrote it
    ranks: Mapping[Rank, tuple[EngineSpec, RankLayout]]
    deployment: Deployment | None = None  # None: described by its ranks, which have one layout

    @property
    def spec(self) -> EngineSpec:
        """The first rank's spec."""
        return self.ranks[min(self.ranks)][0]

    def layouts(self) -> dict[Rank, RankLayout]:
        """Return every rank's layout."""
        return {rank: layout for rank, (_, layout) in self.ranks.items()}

    @functools.cached_property
    def layouts_digest(self) -> Digest:
        """The digest of all ranks' layouts."""
        return digest_of_layouts({rank: digest_of(layout) for rank, (_, layout) in self.ranks.items()})


class _RankForm(msgspec.Struct, forbid_unknown_fields=True):
    """One rank in a file, and in the daemon's response."""

    spec: EngineSpec
    layout: RankLayout


class _ModelForm(msgspec.Struct, forbid_unknown_fields=True):
    """A model of plain attention that is not a preset."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str = "bfloat16"


def parse_engine(text: str, daemon: Callable[[], ControlClient]) -> EngineDescription:
    """Return the engine that `text` describes, with every rank present and valid.

    `daemon` is called only if the text begins with "@". Raises ConfigError that names what is
    wrong with the description, and KvxferdError if the daemon does not respond.
    """
    deployment = None
    if text.startswith("@"):
        ranks = _from_daemon(text[1:], daemon())
    else:
        try:
            is_file = text.endswith((".json", ".toml")) or "/" in text
            found = _from_file(Path(text)) if is_file else _from_keys(text)
            deployment = found if isinstance(found, Deployment) else None
            ranks = found.ranks() if isinstance(found, Deployment) else found
        except ValueError as error:
            raise ConfigError(f"{error} (in {text!r})") from error
    try:
        for spec, layout in ranks.values():
            validate_layout(spec, layout)
        check_engine(ranks)
    except KvxferdError as error:
        raise ConfigError(f"{error.message} (in {text!r})", error.code) from error
    return EngineDescription(text, ranks, deployment)


def _from_keys(text: str) -> Deployment:
    name, *pairs = text.split(",")
    keys: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"cannot use {text!r}: {pair!r} is no key=value; {_USAGE}")
        if key in keys:
            raise ConfigError(f"cannot use {text!r}: {key} is given twice")
        keys[key] = value
    return _from_preset(find_model(name), keys)


def _from_preset(model: ModelFacts, keys: Mapping[str, Any]) -> Deployment:
    """Return a model's deployment by keys, whose values are text or values of a file."""
    chosen: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in (*_INTEGER_KEYS, *_TEXT_KEYS):
            raise ConfigError(
                f"cannot use key {key!r}: the keys are {', '.join((*_INTEGER_KEYS, *_TEXT_KEYS))}; {_USAGE}"
            )
        chosen[key] = _parse_integer(key, value) if key in _INTEGER_KEYS else value
    if "kv_dtype" in chosen:
        model = _with_kv_dtype(model, str(chosen.pop("kv_dtype")))
    if "stages" in chosen:
        stages = chosen["stages"]
        parts = stages.split("+") if isinstance(stages, str) else stages
        chosen["stages"] = tuple(_parse_integer("stages", part) for part in parts)
        chosen.setdefault("pp", len(chosen["stages"]))
    if "pages" in chosen:
        pages = chosen.pop("pages")
        if pages not in ("shared", "own"):
            raise ConfigError(f"cannot use pages={pages}: it is shared or own")
        chosen["shared_pages"] = pages == "shared"
    if "draft" in chosen:
        chosen["draft"] = find_model(chosen["draft"])
    chosen.setdefault("layout", model.default_layout)
    choices = DeploymentOptions(**chosen)
    if choices.pp * choices.ranks_per_stage > MAX_ENGINE_RANKS:
        raise ConfigError(
            f"cannot explain {choices.pp} x {choices.ranks_per_stage} ranks: {MAX_ENGINE_RANKS} is the limit"
        )
    return Deployment(model, choices)


def _parse_integer(key: str, value: Any) -> Any:
    """Return a whole number; for num_blocks also a table of numbers by group."""
    if key == "num_blocks" and isinstance(value, Mapping):
        return {group: _parse_integer(f"num_blocks.{group}", count) for group, count in value.items()}
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        return int(value)
    except ValueError:
        raise ConfigError(f"cannot use {key}={value}: it must be a whole number") from None


def _with_kv_dtype(model: ModelFacts, name: str) -> ModelFacts:
    dtype = _DTYPE_SYNONYMS.get(name, name)
    if dtype not in _ITEMSIZES:
        raise ConfigError(f"cannot use kv_dtype={name}: the dtypes are {', '.join(_ITEMSIZES)}")
    return with_kv_dtype(model, dtype, _ITEMSIZES[dtype])


def _from_file(path: Path) -> Deployment | dict[Rank, tuple[EngineSpec, RankLayout]]:
    try:
        text = path.read_text("utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else msgspec.json.decode(text)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, msgspec.DecodeError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"cannot read {str(path)!r} as {kind}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"cannot use {str(path)!r}: it holds no object at its top")
    return _from_content(str(path), content)


def _from_content(
    name: str, content: dict[str, Any]
) -> Deployment | dict[Rank, tuple[EngineSpec, RankLayout]]:
    """Return the engine of a file in one of its three forms; see docs/reference/explain.md."""
    forms = [form for form in ("preset", "model", "ranks") if form in content]
    if len(forms) != 1:
        raise ConfigError(
            f"cannot use {name!r}: it needs exactly one of preset, model and ranks, and has "
            + (" and ".join(forms) or "none")
        )
    rest = {key: value for key, value in content.items() if key != forms[0]}
    if forms == ["preset"]:
        return _from_preset(find_model(str(content["preset"])), rest)
    try:
        if forms == ["model"]:
            form = msgspec.convert(content["model"], _ModelForm)
            return _from_preset(_plain_model(form), rest)
        listed = msgspec.convert(content["ranks"], list[_RankForm])
    except msgspec.ValidationError as error:
        raise ConfigError(f"cannot use {name!r}: in {forms[0]}: {error}") from error
    return _all_ranks(name, listed)


def _plain_model(form: _ModelForm) -> ModelFacts:
    layers = (LayerKind.FULL,) * form.num_layers
    model = ModelFacts(form.name, form.num_kv_heads, layers, key_and_value(form.num_kv_heads, form.head_dim))
    return _with_kv_dtype(model, form.kv_dtype)


def _all_ranks(name: str, listed: list[_RankForm]) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
    """Return the listed ranks by rank. Raises ConfigError if some are missing."""
    ranks = {form.spec.rank: (form.spec, form.layout) for form in listed}
    if not ranks:
        raise ConfigError(f"cannot use {name!r}: it lists no rank")
    if len(ranks) < len(listed):
        raise ConfigError(f"cannot use {name!r}: a rank is listed twice")
    spec = ranks[min(ranks)][0]
    lacking = [rank for rank in spec.ranks() if rank not in ranks]
    if lacking:
        raise ConfigError(
            f"cannot use {name!r}: of the engine's {spec.pp_size} x {spec.tp_size} ranks it lacks "
            + ", ".join(map(str, lacking[:8]))
            + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
        )
    return ranks


def _from_daemon(engine_id: str, daemon: ControlClient) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
    reply = daemon.get(f"/v1/engines/{urllib.parse.quote(engine_id, safe='')}/layouts")
    try:
        listed = msgspec.convert(reply["ranks"], list[_RankForm])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"cannot read what the daemon says of {engine_id!r}: {error}") from error
    return _all_ranks(f"@{engine_id}", listed)
