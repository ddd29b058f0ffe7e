"""References: the router carries them from the prefill engine to the decode engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint, EngineId, Generation, TransferId
from kvxferd.wire import common
from kvxferd.wire.limits import MAX_ENDPOINT_CHARS, MAX_NAME_CHARS, MAX_REF_BYTES
from kvxferd.wire.traceparent import read_traceparent

MAX_INT = (1 << 63) - 1  # the largest integer that every reader of msgpack takes


class TransferRef(common.TransferRef, frozen=True):
    """A reference to a published transfer, plain as JSON. Any process that has it may read the transfer.

    Attributes:
        endpoint: the peer socket of the daemon that is the engine's home, ``tcp://HOST:PORT`` with
            ``#KEY`` behind it where CURVE is on.
        engine_id: the engine that published.
        generation: that engine's generation.
        transfer_id: as given to `publish`.
        nonce: 32 hex digits that prove the right to read.
        traceparent: of the request's trace (W3C Trace Context), where the publisher named one. Two
            references that differ in it alone are equal.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return it as a dict of strings and integers, for a router that builds JSON itself."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    def to_json(self) -> str:
        """Return it as a JSON object."""
        return msgspec.json.encode(self).decode()


RefLike = common.TransferRef | Mapping[str, Any] | str | bytes


MIN_NONCE_CHARS = 32


def make_ref(
    endpoint: str, engine_id: str, generation: str, transfer_id: str, nonce: str | None = None
) -> TransferRef:
    """Return the reference of a transfer to be published: for a router that asks both engines at once.

    The prefill engine publishes it with this `transfer_id` and `nonce`, and the decode engine pulls it with
    `progressive=True`. Whoever has the nonce may read the transfer, so it goes to these two engines alone.

    Args:
        endpoint, engine_id, generation: of the prefill engine; its daemon lists them (`GET /v1/engines`).
        transfer_id: 1 to 256 characters, used once in the engine's generation.
        nonce: 32 to 256 characters that nobody can guess; None: 32 random hex digits.

    Raises EngineError (`transfer-unknown`).
    """
    chosen = secrets.token_hex(16) if nonce is None else check_nonce(nonce)
    fields = {"endpoint": endpoint, "engine_id": engine_id, "generation": generation}
    ref = read_ref({**fields, "transfer_id": transfer_id, "nonce": chosen})
    assert isinstance(ref, TransferRef)
    return ref


def check_nonce(nonce: str) -> str:
    """Return a nonce that is long enough not to be guessed. Raises EngineError."""
    checked = check_name(nonce, "a nonce", Code.BAD_REQUEST)
    if len(checked) < MIN_NONCE_CHARS:
        raise EngineError(
            f"cannot use a nonce of {len(checked)} characters: give {MIN_NONCE_CHARS} random ones at least, "
            "because whoever guesses it may read the transfer"
        )
    return checked


def read_ref(ref: RefLike) -> common.TransferRef:
    """Return the reference, whichever form it has. Raises EngineError(transfer-unknown).

    The result can be encoded: every field is checked here, in the caller's thread, also those of a
    `TransferRef`, which are not checked when it is made.
    """
    try:
        given = _fields_of(ref)
        return TransferRef(
            endpoint=Endpoint(_text_field(given, "endpoint", MAX_ENDPOINT_CHARS)),
            engine_id=EngineId(_text_field(given, "engine_id")),
            generation=Generation(_text_field(given, "generation")),
            transfer_id=TransferId(_text_field(given, "transfer_id")),
            nonce=_text_field(given, "nonce"),
            # A hint: one that is not valid is dropped, and the transfer is pulled all the same.
            traceparent=read_traceparent(given.get("traceparent")),
        )
    # RecursionError: JSON that is nested as deep as it is long.
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
        raise EngineError(
            f"cannot read the transfer reference: {error}; hand on what publish() returned, unchanged",
            Code.TRANSFER_UNKNOWN,
        ) from error


def _fields_of(ref: object) -> Mapping[str, object]:
    """Return the reference's fields, unchecked."""
    if isinstance(ref, common.TransferRef):
        return msgspec.structs.asdict(ref)
    if isinstance(ref, str | bytes):
        if len(ref) > MAX_REF_BYTES:
            raise ValueError(f"it has {len(ref)} bytes, at most {MAX_REF_BYTES} go")
        ref = msgspec.json.decode(ref)
    if not isinstance(ref, Mapping):
        raise TypeError(f"it is a {type(ref).__name__}")
    return ref


def _text_field(given: Mapping[str, object], name: str, most_chars: int = MAX_NAME_CHARS) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise TypeError(f"`{name}` is missing or no text")
    if not 0 < len(value) <= most_chars:
        raise ValueError(f"`{name}` has {len(value)} characters, 1 to {most_chars} go")
    return as_utf8_str(value)


def check_name(name: str, what: str, code: Code) -> str:
    """Return `name` if the wire can carry it. Raises EngineError(code)."""
    try:
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS:
            return as_utf8_str(name)
    except UnicodeEncodeError:
        pass
    raise EngineError(f"cannot use {name!r:.80} as {what}: give 1 to {MAX_NAME_CHARS} characters", code)


def as_utf8_str(text: str) -> str:
    """Return a text that msgpack can carry. Raises UnicodeEncodeError (a ValueError) for a lone surrogate."""
    return str.encode(text).decode()
