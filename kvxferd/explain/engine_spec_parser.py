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


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model and the options that an engine is deployed with."""

    model: ModelFacts
    options: DeploymentOptions

    def ranks(self) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
        """Return spec and layout of every rank. Raises ValueError for options that do not suit the model."""
        return deploy(self.model, self.options)

    @property
    def takes_its_layout(self) -> bool:
        """Whether the kernels of the model take the layout."""
        return self.model.takes_layout(self.options.layout)

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


class _RanksForm(msgspec.Struct, forbid_unknown_fields=True):
    ranks: list[_RankForm]


class _ModelForm(msgspec.Struct, forbid_unknown_fields=True):
    """A model of plain attention that is not a preset."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str = "bfloat16"

    def facts(self) -> ModelFacts:
        """Return the model."""
        heads = key_and_value(self.num_kv_heads, self.head_dim)
        model = ModelFacts(self.name, self.num_kv_heads, (LayerKind.FULL,) * self.num_layers, heads)
        return _with_kv_dtype(model, self.kv_dtype)


_OPTIONS = [field.name for field in dataclasses.fields(DeploymentOptions)]
_USAGE = (
    "an engine is described by PRESET[,key=value...] (as in 'llama-3-70b,tp=8,pp=2,layout=HND'), by a "
    ".json or .toml file, or by @ENGINE_ID for one that is live in the daemon; the keys are "
    + ", ".join(("kv_dtype", *_OPTIONS))
)


def parse_engine(text: str, daemon: Callable[[], ControlClient]) -> EngineDescription:
    """Return the engine that `text` describes, with every rank present and valid.

    `daemon` is called only if the text begins with "@". Raises ConfigError that names what is
    wrong with the description, and KvxferdError if the daemon does not respond.
    """
    deployment = None
    try:
        if text.startswith("@"):
            quoted = urllib.parse.quote(text[1:], safe="")
            content = daemon().get(f"/v1/engines/{quoted}/layouts")
        elif text.endswith((".json", ".toml")) or "/" in text:
            content = _read_file(Path(text))
        else:
            content = _keys(text)
        forms = content.keys() & {"preset", "model", "ranks"}
        if len(forms) != 1:
            raise ConfigError(f"cannot use {text!r}: it needs exactly one of preset, model and ranks")
        if forms == {"ranks"}:
            ranks = _all_ranks(text, msgspec.convert(content, _RanksForm).ranks)
        else:
            deployment = _deployment(content)
            ranks = deployment.ranks()
    except msgspec.ValidationError as error:
        raise ConfigError(f"cannot use {text!r}: {error}; {_USAGE}") from error
    except ValueError as error:
        raise ConfigError(f"{error} (in {text!r})") from error
    try:
        for spec, layout in ranks.values():
            validate_layout(spec, layout)
        check_engine(ranks)
    except KvxferdError as error:
        raise ConfigError(f"{error.message} (in {text!r})", error.code) from error
    return EngineDescription(text, ranks, deployment)


def _deployment(content: dict[str, Any]) -> Deployment:
    """Return the deployment of a preset or a model, with the texts of an argument or the values of a file.

    Raises ValueError and msgspec.ValidationError.
    """
    keys = dict(content)
    if "model" in keys:
        model = msgspec.convert(keys.pop("model"), _ModelForm).facts()
    else:
        model = find_model(str(keys.pop("preset")))
    if "kv_dtype" in keys:
        model = _with_kv_dtype(model, str(keys.pop("kv_dtype")))
    if unknown := keys.keys() - _OPTIONS:
        raise ValueError(f"cannot use key {min(unknown)!r}: {_USAGE}")
    if "stages" in keys:
        stages = keys["stages"]
        keys["stages"] = stages.split("+") if isinstance(stages, str) else stages
        keys.setdefault("pp", len(keys["stages"]))
    options = msgspec.convert({"layout": model.default_layout, **keys}, DeploymentOptions, strict=False)
    if options.pp * options.ranks_per_stage > MAX_ENGINE_RANKS:
        raise ValueError(
            f"cannot explain {options.pp} x {options.ranks_per_stage} ranks: {MAX_ENGINE_RANKS} is the limit"
        )
    return Deployment(model, options)


def _keys(text: str) -> dict[str, Any]:
    """Return the preset and the keys of an argument."""
    name, *pairs = text.split(",")
    keys: dict[str, Any] = {"preset": name}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"cannot use {text!r}: {pair!r} is no key=value; {_USAGE}")
        if key in keys:
            raise ConfigError(f"cannot use {text!r}: {key} is given twice")
        keys[key] = value
    return keys


def _with_kv_dtype(model: ModelFacts, name: str) -> ModelFacts:
    dtype = _DTYPE_SYNONYMS.get(name, name)
    if dtype not in _ITEMSIZES:
        raise ValueError(f"cannot use kv_dtype={name}: the dtypes are {', '.join(_ITEMSIZES)}")
    return with_kv_dtype(model, dtype, _ITEMSIZES[dtype])


def _read_file(path: Path) -> dict[str, Any]:
    """Return what a file holds, in one of three forms; see docs/reference/explain.md."""
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
    return content


def _all_ranks(name: str, listed: list[_RankForm]) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
    """Return the listed ranks by rank. Raises ConfigError where there is none, or one twice."""
    ranks = {form.spec.rank: (form.spec, form.layout) for form in listed}
    if not ranks:
        raise ConfigError(f"cannot use {name!r}: it lists no rank")
    if len(ranks) < len(listed):
        raise ConfigError(f"cannot use {name!r}: a rank is listed twice")
    return ranks
