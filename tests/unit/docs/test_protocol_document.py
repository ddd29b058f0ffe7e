"""docs/reference/protocol.md says what the code does: messages, fields, limits, codes and the example."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from msgspec import inspect

from kvxferd.errors import Code
from kvxferd.ids import Rank
from kvxferd.layout import unpack_ids
from kvxferd.wire import limits, peer, worker
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.common import BlockIds, FdBatch
from kvxferd.wire.framing import HEADER, FrameDecoder, encode_frame
from tests.support.repository import ROOT

PATH = ROOT / "docs" / "reference" / "protocol.md"

# --- the page and the code as data


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


SECTIONS = sections()
UNIONS = {
    "Client to daemon": get_args(worker.ClientMessage),
    "Daemon to client": get_args(worker.DaemonMessage),
}
MESSAGES = sorted({message for union in UNIONS.values() for message in union}, key=lambda m: m.__name__)
STRUCTS = sorted(
    {struct for message in MESSAGES for struct in structs_inside(message)}, key=lambda s: s.__name__
)
# The messages whose frames carry descriptors.
WITH_DESCRIPTORS = {
    FdBatch,
    worker.Register,
    worker.Resume,
    worker.NewMover,
    worker.Registered,
    worker.MoverOffered,
}
# Limits of what only daemons send to each other and to their movers.
OF_DAEMONS = {
    *("MAX_ADDRESS", "MAX_DEVICES", "MAX_METADATA_BYTES", "MAX_ENGINE_TENSORS", "MAX_GRANTS_PER_RENEWAL"),
    *("MAX_PEER_MESSAGE_BYTES", "MAX_PEER_REQUEST_BYTES", "MAX_SENTENCE_CHARS", "MAX_REASON_CHARS"),
    "CHUNK_BYTES",
    "MAX_CHUNKS_PER_MOVER",
}


@pytest.mark.parametrize("heading", UNIONS)
def test_messages_are_described_field_by_field_where_they_belong(heading: str) -> None:
    order = list(SECTIONS)
    after = order[order.index(heading) + 1 :]
    own = [message for message in UNIONS[heading] if message not in (BlockIds, FdBatch)]
    assert after[: len(own)] == [tag_of(message) for message in own]
    for message in UNIONS[heading]:
        section = SECTIONS[tag_of(message)]
        assert documented_fields(section) == actual_fields(message), message
        carries = "**Carries" in section or "**carries" in section
        assert carries == (message in WITH_DESCRIPTORS), message


def tag_of(message: type[msgspec.Struct]) -> str:
    return str(message.__struct_config__.tag)


def test_every_struct_is_described_field_by_field() -> None:
    for struct in STRUCTS:
        section = SECTIONS[struct.__name__]
        assert documented_fields(section) == actual_fields(struct), struct
        assert ("An array." in section) == struct.__struct_config__.array_like, struct


def test_requests_of_daemons_and_their_replies_are_named() -> None:
    table = rows(SECTIONS["Requests and replies"])
    assert sorted(row[0] for row in table) == sorted(map(tag_of, get_args(peer.RequestMessage)))
    named = {row[1] for row in table} | {"PeerRefused", "StillWaiting"}
    assert named == {tag_of(message) for message in get_args(peer.ReplyMessage)}


def test_limits() -> None:
    documented = {row[0]: int(row[1]) for row in rows(SECTIONS["Limits"])}
    names = {name for name in dir(limits) if name.isupper()} - OF_DAEMONS
    assert documented == {name: getattr(limits, name) for name in names}


def test_codes() -> None:
    page = PATH.with_name("codes.md").read_text().partition("\n## Exceptions\n")[0]
    assert re.findall(r"^\| `([a-z-]+)` \| \w", page, re.MULTILINE) == [str(code) for code in Code]


def test_the_example_is_what_the_encoder_writes() -> None:
    (raw_publish,) = hex_examples(SECTIONS["Worked example"])
    (publish_frame,) = FrameDecoder().feed(raw_publish)
    publish = CLIENT_MESSAGES.decode(publish_frame.payload)
    assert isinstance(publish, worker.Publish)
    assert list(unpack_ids(publish.blocks["full"].ids)) == [7, 260]
    assert (publish.num_tokens, publish.fence_slot, publish.num_readers) == (32, 0, 1)
    assert encode_frame(encode(publish)) == raw_publish


def test_the_frame_header_and_the_version_are_as_drawn() -> None:
    assert [row[0] for row in rows(SECTIONS["Frame"])] == ["0 to 3", "4 to 5", "6 to 7", "8 on"]
    assert HEADER.format == "<IHH"
    (version,) = {worker.WORKER_VERSIONS, peer.PEER_VERSIONS}
    assert f"each in one version ({version})" in SECTIONS["Protocols"]
