"""Every message of every protocol: tag, fields in order, and how one is encoded.

The frames that version 0.1 sent are recorded from its own code, in `wire/fixtures/0.1`, and held by
`wire/test_frames_of_version_1.py`; here is what this code sends, and what it leaves out for version 1.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from types import ModuleType
from typing import Any, get_args

import msgspec
from msgspec import inspect as types

from kvxferd.bench import protocol as bench_speech
from kvxferd.bench import remote_protocol
from kvxferd.layout import digest_of
from kvxferd.layout.presets import deploy
from kvxferd.mover import forkserver_protocol
from kvxferd.plan import encode_plan, make_plan
from kvxferd.plan.plan import Plan
from kvxferd.wire import limits, mover, peer, staging, worker
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Message, TransferRef
from kvxferd.wire.framing import HEADER, encode_frame
from kvxferd.wire.versions import FIELDS_SINCE_VERSION_2, FIELDS_SINCE_VERSION_3, VERSION_1_CODES
from tests.frozen.shapes import example_of, sorted_map, struct_of

PROTOCOLS: dict[str, Any] = {
    "client to daemon": worker.ClientMessage,
    "daemon to client": worker.DaemonMessage,
    "daemon to daemon": peer.PeerMessage,
    "daemon to mover": mover.ToMover,
    "mover to daemon": mover.FromMover,
    "mover to mover": staging.StagingMessage,
    "daemon to forkserver": forkserver_protocol.Fork,
    "forkserver to daemon": forkserver_protocol.LibraryLoaded
    | forkserver_protocol.LibraryUnavailable
    | forkserver_protocol.Forked
    | forkserver_protocol.ForkFailed,
}


# JSON lines between a tool and its processes; those of the bench go to another machine too.
TOOLS = {"bench": bench_speech, "bench --peer": remote_protocol}


def surface() -> dict[str, Any]:
    """Return every protocol, and what is encoded beside them."""
    return {
        "protocols": {
            name: {str(m.__struct_config__.tag): _message(m) for m in get_args(union) or (union,)}
            for name, union in PROTOCOLS.items()
        },
        "tags": _tags(),
        "versions": {
            "worker": list(msgspec.to_builtins(worker.WORKER_VERSIONS)),
            "peer": list(msgspec.to_builtins(peer.PEER_VERSIONS)),
            "codes that version 1 gets instead": {str(new): str(old) for new, old in VERSION_1_CODES.items()},
            "fields that version 1 is not sent": {
                str(message.__struct_config__.tag): fields
                for message, fields in FIELDS_SINCE_VERSION_2.items()
            },
            "fields that a daemon of version 2 is not sent": {
                str(message.__struct_config__.tag): fields
                for message, fields in FIELDS_SINCE_VERSION_3.items()
            },
        },
        "header": HEADER.format,
        "a frame with 2 descriptors": encode_frame(b"payload", 2).hex(),
        "limits": sorted_map({name: getattr(limits, name) for name in dir(limits) if name.isupper()}),
        "reference": _reference(),
        "tools": {name: _lines(module) for name, module in TOOLS.items()},
        "plan": {"struct": struct_of(Plan), "examples": _plans()},
    }


def _tags() -> list[str]:
    """Return the tags of all messages in the package's modules, those that no protocol lists included."""
    package = importlib.import_module(Message.__module__.rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    found = [cls for cls in _subclasses(Message) if cls.__module__.startswith(package.__name__)]
    return sorted({str(tag) for cls in found if (tag := cls.__struct_config__.tag) is not None})


def _subclasses(cls: type[Message]) -> list[type[Message]]:
    return [inner for sub in cls.__subclasses__() for inner in (sub, *_subclasses(sub))]


def _lines(module: ModuleType) -> dict[str, Any]:
    """Return the tagged structs that a module defines or imports."""
    structs = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, msgspec.Struct)]
    tagged = [v for v in structs if v.__struct_config__.tag is not None]
    return sorted_map({str(struct.__struct_config__.tag): struct_of(struct) for struct in tagged})


def _message(cls: type[Message]) -> dict[str, Any]:
    info = types.type_info(cls)
    assert isinstance(info, types.StructType)
    fields = {f.name: example_of(f.type, f.encode_name) for f in info.fields}
    least = cls(**{f.name: fields[f.name] for f in info.fields if f.required})
    return {
        **struct_of(cls),
        "encoded, required fields": encode(least).hex(),
        "encoded, every field": encode(cls(**fields)).hex(),
    }


def _reference() -> dict[str, Any]:
    info = types.type_info(TransferRef)
    reference = example_of(info, "reference")
    return {"struct": struct_of(TransferRef), "encoded": msgspec.json.encode(reference).decode()}


def _plans() -> dict[str, str]:
    """Return the digests of layouts and plans, which two daemons of different versions compare."""
    found = {}
    for model in ("tiny-dense", "tiny-sliding", "tiny-mamba2"):
        source, sink = deploy(model, tp=2), deploy(model, tp=1)
        layouts = {rank: layout for rank, (_, layout) in source.items()}
        (remote_spec, remote), (spec, layout) = next(iter(source.values())), next(iter(sink.values()))
        plan = make_plan(spec, layout, remote_spec, layouts)
        found[f"{model}, layout"] = str(digest_of(remote))
        found[f"{model}, plan"] = str(plan.digest)
        found[f"{model}, encoded plan"] = hashlib.sha256(encode_plan(plan)).hexdigest()
    return found
