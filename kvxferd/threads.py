"""Threads without which a daemon cannot serve."""

from __future__ import annotations

import threading

from kvxferd.errors import ConfigError


def start_thread(thread: threading.Thread, purpose: str) -> None:
    """Start a thread. `purpose`: what it does, as in "watch the file of keys".

    Raises ConfigError where the system has none: a limit of processes, or of memory.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise ConfigError(f"cannot {purpose}: {error}; raise the limit on threads") from error
