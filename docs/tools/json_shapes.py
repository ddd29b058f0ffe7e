"""The shapes of what the verbs print with --json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from markdown_parts import WIDTH
from msgspec import inspect as types
from msgspec.inspect import type_info
from recorded_surfaces import recorded

from kvxferd.bench.results import Result
from kvxferd.config import SETTINGS
from kvxferd.doctor.peer_ping import Ping

# Shapes that a run against the sample node does not show: those of structs.
STRUCTS: dict[str, type[msgspec.Struct]] = {"ping": Ping, "bench": Result}


def json_shapes() -> Iterator[str]:
    """Yield the shape of each verb's `--json`, as tests/frozen records it of a real run."""
    surface = recorded("command_line")
    shapes: dict[str, list[tuple[str, Any]]] = {}
    for line, run in surface["runs"].items():
        if "shape" in run:
            words = line.split()
            verb = " ".join(words[:2]) if words[0] == "config" else words[0]
            shapes.setdefault(verb, []).append((f"kvxferd {line}", run["shape"]))
    version = {"json_version": "int"}  # of what is recorded without it
    shapes["demo"] = [("kvxferd demo --json", version | surface["demo --json"])]
    found = surface["doctor --json"]
    listed = {"findings": [of_struct(found["finding"])], "placements": [of_struct(found["placement"])]}
    shapes["doctor"] = [("kvxferd doctor --json", version | found["shape"] | listed)]
    for verb, struct in STRUCTS.items():
        shapes[verb] = [(f"kvxferd {verb} --json", version | of_type(type_info(struct)))]
    shapes["ping"][0][1]["status"] = "int"  # the exit code
    for verb, runs in sorted(shapes.items()):
        yield from (f"## `kvxferd {verb}`", "")
        seen: list[Any] = []
        for line, shape in runs:
            if shape not in seen:
                seen.append(shape)
                yield from ("```text", f"$ {line}", *shown_shape(without_settings(shape)), "```", "")


def without_settings(shape: Any) -> Any:
    """Return the shape with one entry in place of one for every setting."""
    if not isinstance(shape, dict):
        return shape
    if shape.keys() == SETTINGS.keys():
        kinds = {json.dumps(value) for value in shape.values()}
        is_object = all(kind.startswith("{") for kind in kinds)
        return {"SECTION.KEY": {"value": "any", "source": "str"} if is_object else "any"}
    return {key: without_settings(value) for key, value in shape.items()}


def of_struct(struct: dict[str, Any]) -> Any:
    """Return the shape of a struct as tests/frozen records it."""
    return {field["name"]: of_recorded(field["type"]) for field in struct["fields"]}


def of_recorded(kind: Any) -> Any:
    """Return the shape of a type as tests/frozen records it."""
    match kind:
        case {"fields": _}:
            return of_struct(kind)
        case {"enum": _}:
            return "str"
        case {"list": inner}:
            return [of_recorded(inner)]
        case {"tuple": inner}:
            return [of_recorded(one.get("type", one)) for one in inner]
        case {"map": [_, value]}:
            return {"NAME": of_recorded(value)}
        case {"any of": inner}:
            return " or ".join(flat_shape(of_recorded(one)) for one in inner)
        case dict():
            return next(iter(kind))
    return kind


def of_type(kind: types.Type) -> Any:
    """Return the shape of a type."""
    match kind:
        case types.StructType(fields=fields):
            return {field.encode_name: of_type(field.type) for field in fields}
        case types.EnumType() | types.LiteralType() | types.StrType():
            return "str"
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return [of_type(item)]
        case types.TupleType(item_types=items):
            return [of_type(item) for item in items]
        case types.NamedTupleType(fields=fields):
            return [of_type(field.type) for field in fields]
        case types.DictType(value_type=value):
            return {"NAME": of_type(value)}
        case types.UnionType(types=inner):
            return " or ".join(dict.fromkeys(flat_shape(of_type(one)) for one in inner))
        case types.Metadata(type=inner):
            return of_type(inner)
    return {types.IntType: "int", types.FloatType: "float", types.BoolType: "bool", types.NoneType: "null"}[
        type(kind)
    ]


def shown_shape(shape: Any, margin: str = "", name: str = "", end: str = "") -> Iterator[str]:
    """Yield a shape as JSON without quotes around types, in lines of at most `WIDTH` columns."""
    flat = f"{margin}{name}{flat_shape(shape)}{end}"
    if len(flat) <= WIDTH or not isinstance(shape, dict | list):
        yield flat
        return
    entries = (
        [(f'"{key}": ', value) for key, value in shape.items()]
        if isinstance(shape, dict)
        else [("", value) for value in shape]
    )
    opening, closing = "{}" if isinstance(shape, dict) else "[]"
    yield f"{margin}{name}{opening}"
    for number, (key, value) in enumerate(entries, 1):
        yield from shown_shape(value, margin + "  ", key, "," if number < len(entries) else "")
    yield f"{margin}{closing}{end}"


def flat_shape(shape: Any) -> str:
    """Return a shape in one line. A list of types is one value of any of them."""
    match shape:
        case dict():
            return "{" + ", ".join(f'"{key}": {flat_shape(value)}' for key, value in shape.items()) + "}"
        case list():
            return "[" + ", ".join(map(flat_shape, shape)) + "]"
    return str(shape)
