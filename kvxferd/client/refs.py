"""References: what the router carries from the prefill engine to the decode engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvxferd.errors import Code, EngineError
from kvxferd.wire import common
from kvxferd.wire.limits import MAX_NAME_CHARS, MAX_REF_BYTES

_MAX_CHARS = 2 * MAX_NAME_CHARS  # an endpoint has a scheme and a port beside its name


class TransferRef(common.TransferRef, frozen=True):
    """A published transfer, as plain JSON. Whoever holds it may read the transfer."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as a dict of strings and integers, for a router that builds JSON itself."""
        return msgspec.structs.asdict(self)

    def to_json(self) -> str:
        """Return it as a JSON object."""
        return msgspec.json.encode(self).decode()


AnyRef = common.TransferRef | Mapping[str, Any] | str | bytes


def read_ref(ref: AnyRef) -> common.TransferRef:
    """Return the reference, whichever form it arrived in. Raises EngineError(transfer-unknown)."""
    try:
        read = _read(ref)
        for name in (read.endpoint, read.engine_id, read.generation, read.transfer_id, read.nonce):
            if len(name) > _MAX_CHARS:
                raise ValueError(f"{name:.80}... has {len(name)} characters, at most {_MAX_CHARS} go")
        return read
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        raise EngineError(
            f"cannot read the transfer reference: {error}; hand on what publish() returned, unchanged",
            Code.TRANSFER_UNKNOWN,
        ) from error


def _read(ref: AnyRef) -> common.TransferRef:
    if isinstance(ref, common.TransferRef):
        return ref
    if isinstance(ref, str | bytes):
        if len(ref) > MAX_REF_BYTES:
            raise ValueError(f"it has {len(ref)} bytes, at most {MAX_REF_BYTES} go")
        return msgspec.json.decode(ref, type=TransferRef)
    return msgspec.convert(dict(ref), TransferRef)


def check_name(name: str, what: str, code: Code) -> str:
    """Return `name` if the wire can carry it. Raises EngineError(code)."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not _is_text(name):
        raise EngineError(f"cannot use {name!r:.80} as {what}: give 1 to {MAX_NAME_CHARS} characters", code)
    return name


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
