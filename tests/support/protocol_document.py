"""docs/reference/protocol.md as data: sections, fields, tables and examples; and the code's fields."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from kvxferd.errors import Code
from kvxferd.ids import Rank

PATH = Path(__file__).parents[2] / "docs" / "reference" / "protocol.md"


class Field(NamedTuple):
    """One field of a message or a struct."""

    name: str
    kind: str
    default: str


def sections() -> dict[str, str]:
    """Return the text under each heading, by the heading's text without backticks."""
    pieces = re.split(r"^#+ +(.+)$", PATH.read_text(), flags=re.MULTILINE)
    headings = [heading.replace("`", "") for heading in pieces[1::2]]
    assert len(set(headings)) == len(headings), "two sections of one name"
    return dict(zip(headings, pieces[2::2], strict=True))


def rows(section: str) -> list[list[str]]:
    """Return the body of the section's first table, without backticks."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


def documented_fields(section: str) -> list[Field]:
    """Return what the section says of a struct's fields: `* name (type = default): meaning`."""
    found = re.findall(r"^\* `(\w+)` \((.+?)\):\s+\S", section, re.MULTILINE)
    return [
        Field(name, kind, default.strip("`") if has_default else "required")
        for name, (kind, has_default, default) in ((name, kind.partition(" = ")) for name, kind in found)
    ]


def hex_examples(section: str) -> list[bytes]:
    """Return the bytes of each hex block; what follows a # in a line is a remark."""
    blocks = re.findall(r"```hex\n(.*?)```", section, flags=re.DOTALL)
    return [bytes.fromhex("".join(line.split("#")[0] for line in block.splitlines())) for block in blocks]


def actual_fields(struct: type[msgspec.Struct]) -> list[Field]:
    """Return what the code says of a struct's fields."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return [Field(field.encode_name, _kind(field.type), _default(field)) for field in info.fields]


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.encode(default).decode()


_PLAIN = {
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bin",
    inspect.BoolType: "bool",
    inspect.NoneType: "nil",
}


def _kind(kind: inspect.Type) -> str:
    match kind:
        case inspect.EnumType(cls=cls):
            return "code" if cls is Code else cls.__name__
        case inspect.StructType(cls=cls):
            return cls.__name__
        case inspect.NamedTupleType(cls=cls):
            assert cls is Rank
            return "Rank"
        case inspect.DictType(key_type=key, value_type=value):
            return f"map of {_kind(key)} to {_kind(value)}"
        case inspect.VarTupleType(item_type=item):
            return f"array of {_kind(item)}"
        case inspect.TupleType(item_types=items):
            return f"[{', '.join(map(_kind, items))}]"
        case inspect.UnionType(types=types):
            return " or ".join(_kind(one) for one in types)
        case _:
            return _PLAIN[type(kind)]


def structs_inside(message: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    """Return every struct that the message carries, at any depth."""
    found: set[type[msgspec.Struct]] = set()

    def look(kind: Any) -> None:
        match kind:
            case inspect.StructType(cls=cls, fields=fields):
                if cls not in found:
                    found.add(cls)
                    for field in fields:
                        look(field.type)
            case inspect.DictType(value_type=value):
                look(value)
            case inspect.VarTupleType(item_type=item):
                look(item)
            case inspect.TupleType(item_types=items) | inspect.UnionType(types=items):
                for item in items:
                    look(item)

    look(inspect.type_info(message))
    return found - {message}
