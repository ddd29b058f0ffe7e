"""What others import: names, signatures and fields of the public modules, and the entry points.

Without annotations: they name classes, which may be called otherwise elsewhere. The vLLM connector is read
from its syntax tree, as vLLM is not here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import tomllib
from enum import Enum
from typing import Any

import msgspec

from kvxferd.client import TransferRef
from kvxferd.ids import Endpoint, EngineId, Generation, TransferId
from kvxferd.integrations.vllm import request_params, stats
from tests.frozen.shapes import signature_of, sorted_map, struct_of
from tests.frozen.tree import ROOT, parsed

PUBLIC = (
    "kvxferd",
    "kvxferd.client",
    "kvxferd.errors",
    "kvxferd.ids",
    "kvxferd.layout",
    "kvxferd.layout.presets",
    "kvxferd.memory",
    "kvxferd.plan",
    "kvxferd.resident",
    "kvxferd.integrations.vllm",
)
# What vLLM imports by name: the connector, and the backend of its sleep mode.
OF_VLLM = {
    "kvxferd.integrations.vllm": "KvxferdConnector",
    "kvxferd.integrations.vllm.sleep_backend": "KvxferdSleepBackend",
}


def surface() -> dict[str, Any]:
    """Return modules, classes that vLLM loads, and entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        "modules": {name: _module(name) for name in PUBLIC},
        "of vLLM": {f"{module}:{name}": _of_vllm(module, name) for module, name in OF_VLLM.items()},
        "kv_transfer_params": request_params.params_for_decode(_reference()),
        "figures of vLLM's log": stats.summary(_figures()),
        "scripts": project["scripts"],
        "entry points": project["entry-points"],
        "extras": sorted(project["optional-dependencies"]),
    }


def _reference() -> TransferRef:
    return TransferRef(Endpoint("tcp://h:1"), EngineId("e"), Generation("g"), TransferId("t"), "0" * 32)


def _figures() -> dict[str, Any]:
    """Return an interval with one observation of each kind."""
    return {name: [1.0] if isinstance(of, list) else {"busy": 1} for name, of in stats.empty().items()}


def _module(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, value in vars(module).items() if _is_own(n, value, name)]
    lazy = {n for n in names if n not in vars(module)}
    return sorted_map({n: "lazy" if n in lazy else _thing(getattr(module, n)) for n in names})


def _is_own(name: str, value: Any, module: str) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", None) == module


def _thing(value: Any) -> Any:
    match value:
        case type():
            return _class(value)
        case _ if callable(value) and hasattr(value, "__supertype__"):
            return {"new type of": value.__supertype__.__name__}
        case _ if callable(value):
            return {"function": signature_of(value)}
    return {"value": type(value).__name__}


def _class(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if issubclass(cls, Enum):
        found["values"] = {member.name: member.value for member in cls}
    elif issubclass(cls, msgspec.Struct):
        found["struct"] = struct_of(cls)
    elif dataclasses.is_dataclass(cls):
        found["fields"] = [_field(field) for field in dataclasses.fields(cls) if field.init]
    else:
        found["new"] = signature_of(cls)
    members = {n: m for base in reversed(_bases(cls)) for n, m in vars(base).items() if not n.startswith("_")}
    if methods := {n: _member(m) for n, m in members.items() if callable(m) or isinstance(m, _WRAPPED)}:
        found["methods"] = sorted_map(methods)
    return found


def _field(field: dataclasses.Field[Any]) -> str:
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return f"{field.name}={field.default!r}" if has_default else field.name


_WRAPPED = (property, staticmethod, classmethod)


def _bases(cls: type) -> list[type]:
    """Return the class and those of its bases that are of this package."""
    return [base for base in cls.__mro__ if base.__module__.startswith("kvxferd")]


def _member(member: Any) -> str:
    match member:
        case property():
            return "property"
        case staticmethod() | classmethod():
            return f"{type(member).__name__}{signature_of(member.__func__)}"
    return signature_of(member)


def _of_vllm(module: str, name: str) -> dict[str, str]:
    """Return the public methods of a class, by the file that defines it."""
    path = module_path(module)
    for node in ast.walk(parsed(path)):
        match node:
            case ast.ClassDef(name=found) if found == name:
                return {
                    f.name: ast.unparse(_bare(f.args))
                    for f in node.body
                    if isinstance(f, ast.FunctionDef) and (not f.name.startswith("_") or f.name == "__init__")
                }
            case ast.ImportFrom(module=source, names=names) if source and any(a.name == name for a in names):
                return _of_vllm(source, name)
    raise LookupError(f"{name} is not in {module}")


def _bare(arguments: ast.arguments) -> ast.arguments:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return arguments


def module_path(module: str) -> Any:
    """Return the file of a module of this repository."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
