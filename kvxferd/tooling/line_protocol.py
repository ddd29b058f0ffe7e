"""Commands to a child process and its replies: one JSON object a line, typed by msgspec."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvxferd.errors import KvxferdError

C = TypeVar("C")
R = TypeVar("R")
K = TypeVar("K")

_ENCODER = msgspec.json.Encoder()


def encode_line(line: Any) -> bytes:
    """Return the encoded line with its newline."""
    return _ENCODER.encode(line) + b"\n"


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="t", kw_only=True):
    """Base of commands and replies."""


class CommandFailed(Line, frozen=True):
    """The command failed."""

    message: str


class LineProtocol(Generic[C, R]):
    """The commands and replies of one kind of process; one of the replies is `CommandFailed`."""

    def __init__(self, commands: Any, replies: Any) -> None:
        self._commands: msgspec.json.Decoder[C] = msgspec.json.Decoder(commands)
        self._replies: msgspec.json.Decoder[R] = msgspec.json.Decoder(replies)

    def decode_command(self, line: bytes) -> C:
        """Return a command. Raises msgspec.DecodeError."""
        return self._commands.decode(line)

    def encode_failure(self, message: str) -> bytes:
        """Return the encoded reply to a command that failed."""
        return encode_line(CommandFailed(message=message))

    def decode_reply(self, line: bytes, kind: type[K], tool: str, name: str) -> K:
        """Return a process's reply. Raises KvxferdError if its command failed, or for any other line."""
        try:
            reply: Any = self._replies.decode(line)
        except msgspec.DecodeError as error:
            raise KvxferdError(f"cannot run {tool}: process {name} sent no valid reply: {error}") from None
        if isinstance(reply, CommandFailed):
            raise KvxferdError(f"cannot run {tool}: process {name}: {reply.message}")
        if not isinstance(reply, kind):
            raise KvxferdError(
                f"cannot run {tool}: process {name} sent {type(reply).__name__} instead of {kind.__name__}"
            )
        return reply
