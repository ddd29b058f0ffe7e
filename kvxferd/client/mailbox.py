"""The queue of events for the engine: a list, and an eventfd that is readable while it has any."""

from __future__ import annotations

import os
import threading

from kvxferd.client.events import Event


class EventQueue:
    """Thread-safe. No event is dropped: a session emits few events for each request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor that is readable while there are events; -1 after `close`."""
        return -1 if self._closed else self._fd

    def put(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            self._events.append(event)
            if len(self._events) == 1 and not self._closed:
                os.eventfd_write(self._fd, 1)

    def drain(self) -> list[Event]:
        """Return and remove all events, oldest first."""
        with self._lock:
            events, self._events = self._events, []
            if events and not self._closed:
                os.eventfd_read(self._fd)
        return events

    def close(self) -> None:
        """Close the descriptor; `drain` still returns the events that are left."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
