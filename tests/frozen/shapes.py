"""Types and values without the names of Python's classes: what a rename must leave alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import msgspec
from msgspec import inspect as types

Shape = Any  # a name of JSON's, a list of one shape, or a dict of shapes

_PLAIN = {
    types.AnyType: "any",
    types.BoolType: "bool",
    types.BytesType: "bytes",
    types.FloatType: "float",
    types.IntType: "int",
    types.NoneType: "null",
    types.RawType: "raw",
    types.StrType: "str",
}
_LIMITS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")


def type_of(kind: types.Type) -> Any:
    """Return a type as JSON: structs with their fields in order, enums with their values."""
    match kind:
        case types.Metadata(type=inner):
            return type_of(inner)
        case types.StructType(cls=cls):
            return struct_of(cls)
        case types.NamedTupleType(fields=fields):
            return {"tuple": [{"name": field.name, "type": type_of(field.type)} for field in fields]}
        case types.EnumType(cls=cls):
            return {"enum": [member.value for member in cls]}
        case types.LiteralType(values=values):
            return {"enum": list(values)}
        case types.DictType(key_type=key, value_type=value):
            return {"map": [type_of(key), type_of(value)], **_limits(kind)}
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return {"list": type_of(item), **_limits(kind)}
        case types.TupleType(item_types=items):
            return {"tuple": [type_of(item) for item in items]}
        case types.UnionType(types=inner):
            return {"any of": [type_of(one) for one in inner]}
    name = _PLAIN[type(kind)]
    return {name: limits} if (limits := _limits(kind)) else name


def struct_of(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Return how a struct is encoded: its tag, its form, and its fields in order."""
    config = cls.__struct_config__
    info = types.type_info(cls)
    assert isinstance(info, types.StructType)
    return {
        **({} if config.tag is None else {"tag": config.tag, "tag field": config.tag_field}),
        "form": "array" if config.array_like else "map",
        "unknown fields": "refused" if config.forbid_unknown_fields else "ignored",
        "defaults": "left out" if config.omit_defaults else "sent",
        "fields": [
            {"name": field.encode_name, "type": type_of(field.type), **_default(field)}
            for field in info.fields
        ],
    }


def _default(field: types.Field) -> dict[str, Any]:
    if field.required:
        return {}
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return {"default": "left out"}  # msgspec.UNSET
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return {"default": bytes(value).hex() if isinstance(value, msgspec.Raw) else msgspec.to_builtins(value)}


def _limits(kind: types.Type) -> dict[str, Any]:
    return {name: value for name in _LIMITS if (value := getattr(kind, name, None)) is not None}


def example_of(kind: types.Type, name: str) -> Any:
    """Return a value of that type which is not its field's default, the same each time."""
    match kind:
        case types.Metadata(type=inner):
            return example_of(inner, name)
        case types.StructType(cls=cls, fields=fields):
            return cls(**{field.name: example_of(field.type, field.encode_name) for field in fields})
        case types.NamedTupleType(cls=cls, fields=fields):
            return cls(*(example_of(field.type, field.name) for field in fields))
        case types.EnumType(cls=cls):
            return next(iter(cls))
        case types.DictType(key_type=key, value_type=value):
            return {example_of(key, "key"): example_of(value, name)}
        case types.VarTupleType(item_type=item):
            return (example_of(item, name),)
        case types.ListType(item_type=item):
            return [example_of(item, name)]
        case types.TupleType(item_types=items):
            return tuple(example_of(item, name) for item in items)
        case types.UnionType(types=inner):
            return example_of(next(one for one in inner if not isinstance(one, types.NoneType)), name)
        case types.BoolType():
            return True
        case types.IntType():
            return 7 + len(name)
        case types.FloatType():
            return 1.5
        case types.BytesType():
            return bytes(range(16))
        case types.StrType():
            return f"{name}-1"
        case types.RawType():
            return msgspec.Raw(b"\x07")
    raise NotImplementedError(kind)


def shape_of(value: Any) -> Shape:
    """Return the shape of a JSON value: its keys and types. A list has one, of all its items together."""
    match value:
        case dict():
            return {key: shape_of(inner) for key, inner in value.items()}
        case list() | tuple():
            return [merged(map(shape_of, value))] if value else []
        case bool():
            return "bool"
        case Enum():
            return shape_of(value.value)
    return {int: "int", float: "float", str: "str", type(None): "null"}[type(value)]


def merged(shapes: Iterable[Shape]) -> Shape:
    """Return one shape for values of one place: the union of their keys, all their types."""
    found: list[Shape] = []
    for shape in shapes:
        if isinstance(shape, dict) and found and isinstance(found[0], dict):
            found[0] = {
                key: merged([of[key] for of in (found[0], shape) if key in of])
                for key in dict.fromkeys([*found[0], *shape])
            }
        elif isinstance(shape, list) and found and isinstance(found[0], list):
            found[0] = [merged([*found[0], *shape])] if found[0] + shape else []
        elif shape not in found:
            found.append(shape)
    return found[0] if len(found) == 1 else sorted(found, key=str)


def signature_of(function: Any) -> str:
    """Return its parameters and their defaults; no annotations, which name classes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def sorted_map(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries in the order of their names: where the order says nothing."""
    return dict(sorted(entries.items()))
