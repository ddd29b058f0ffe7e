"""Checks of an engine's arguments, in its own thread: what passes can be sent."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from kvxferd.errors import Code, EngineError
from kvxferd.ids import GroupName
from kvxferd.layout import BlockList, BlocksByGroup, PackedBlocks, borrow_ids, num_id_bytes, pack_ids
from kvxferd.wire.common import as_utf8_str
from kvxferd.wire.limits import MAX_GROUPS_PER_REQUEST, MAX_NAME_CHARS, MAX_REQUEST_IDS_BYTES

MAX_INT = (1 << 63) - 1  # the largest integer that every reader of msgpack takes
MAX_SECONDS = 10 * 365 * 24 * 3600.0  # a time beyond this is a mistake in units; clocks and timers take it


def pack_blocks(
    blocks: Mapping[str, BlockList], groups: Mapping[str, str] | None, what: str
) -> BlocksByGroup:
    """Return `blocks` ready for the wire, copied unless they are borrowed.

    `groups`: each of the rank's groups, as a plain string by its name; None: no layout (a scheduler).
    Raises EngineError(blocks-invalid).
    """
    packed: BlocksByGroup = {}
    if not hasattr(blocks, "items"):
        raise EngineError(
            f"cannot {what}: blocks are a BlockList by the name of its group, not {blocks!r:.80}"
        )
    if len(blocks) > MAX_GROUPS_PER_REQUEST:
        raise EngineError(f"cannot {what}: {len(blocks)} groups, at most {MAX_GROUPS_PER_REQUEST} go")
    for name, listed in blocks.items():
        plain = groups.get(name) if groups is not None else check_name(name, "a group", Code.BLOCKS_INVALID)
        if plain is None:
            raise EngineError(
                f"cannot {what}: the layout has no group {name!r}, only "
                f"{', '.join(map(repr, sorted(groups or ())))}"
            )
        packed[GroupName(plain)] = _pack_one(plain, listed, what)
    if (total := num_id_bytes(packed)) > MAX_REQUEST_IDS_BYTES:
        raise EngineError(f"cannot {what}: {total} bytes of block ids, at most {MAX_REQUEST_IDS_BYTES} go")
    return packed


def _pack_one(name: str, listed: BlockList, what: str) -> PackedBlocks:
    if not isinstance(listed, BlockList):
        raise EngineError(f"cannot {what}: blocks of group {name!r}: give a BlockList(ids=...)")
    try:
        first_token = as_int(listed.first_token, "first_token", -MAX_INT, what)
        state_at = as_int(listed.state_at, "state_at", -MAX_INT, what)
        packed = borrow_ids(listed.ids) if listed.borrowed else pack_ids(listed.ids)  # type: ignore[arg-type]
        return PackedBlocks(ids=packed, first_token=first_token, state_at=state_at)
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"cannot {what}: blocks of group {name!r}: {error}", Code.BLOCKS_INVALID) from error


def as_int(value: object, name: str, least: int, what: str) -> int:
    """Return an integer (numpy's too) as Python's. Raises EngineError(blocks-invalid)."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise EngineError(f"cannot {what}: {name} must be an integer, not {value!r}") from error
    if not least <= number <= MAX_INT:
        shown = number if abs(number) <= MAX_INT else "too large"  # Python prints no number of any length
        raise EngineError(f"cannot {what}: {name} is {shown}, must be at least {least}, at most {MAX_INT}")
    return number


def as_seconds(value: float, name: str, what: str) -> float:
    """Return a positive number of seconds. Raises EngineError(bad-request)."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(
            f"cannot {what}: {name} must be seconds, not {value!r:.80}", Code.BAD_REQUEST
        ) from error
    if not 0 < seconds <= MAX_SECONDS:  # NaN is not in between either
        raise EngineError(
            f"cannot {what}: {name} is {seconds}, must be positive and at most {MAX_SECONDS:g}",
            Code.BAD_REQUEST,
        )
    return seconds


def check_name(name: str, what: str, code: Code) -> str:
    """Return `name` if the wire can carry it. Raises EngineError(code)."""
    try:
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS:
            return as_utf8_str(name)
    except UnicodeEncodeError:
        pass
    raise EngineError(f"cannot use {name!r:.80} as {what}: give 1 to {MAX_NAME_CHARS} characters", code)
