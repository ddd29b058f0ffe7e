"""What a shell's completion offers behind an option or as an argument: ids that the daemon shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

# A daemon that serves replies in milliseconds. The shell waits, so one that does not is left out.
TIMEOUT_S = 0.3
MAX_OFFERED = 200
# An id comes from engines and peers, and a shell would run what it finds in a word that it completes.
_HARMLESS = re.compile(r"[A-Za-z0-9_.@/][A-Za-z0-9_.@%+=,/#\[\]:-]*")

ShellComplete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete a path."""
    return [CompletionItem(incomplete, type="file")]


def complete_from(path: str, ids: Callable[[Any], Iterable[str]]) -> ShellComplete:
    """Return a completion with the ids in the daemon's response at `path`; nothing if it does not reply."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            names = sorted(set(ids(_response(ctx, path))))
        except Exception:  # an error would be printed into the line that the operator types
            return []
        offered = [name for name in names if name.startswith(incomplete) and _HARMLESS.fullmatch(name)]
        return [CompletionItem(name) for name in offered[:MAX_OFFERED]]

    return complete


def endpoints(response: Any) -> Iterable[str]:
    """Return the peers' endpoints of `/v1/peers`."""
    return (peer["endpoint"] for peer in response["peers"])


def _response(ctx: click.Context, path: str) -> Any:
    import os

    from kvxferd.config import load_config
    from kvxferd.tooling.control_client import ControlClient

    given = ctx.params.get("socket_path")
    socket_path = given or load_config(ctx.params.get("config_path"), os.environ, {}).control.socket
    return ControlClient(socket_path, TIMEOUT_S).get(path)
