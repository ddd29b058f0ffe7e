"""A Python object in a process of its own, and calls of its methods from here.

    rank = ChildProcess(EngineRank, directory / "rank.log")
    seconds = rank.call(EngineRank.register, socket, spec, layout)

A call is a function with its arguments, pickled, over a socketpair between a tool and its own child; mypy
checks arguments and result. Functions, classes and exceptions must be importable by name in the child, which
searches this process's `sys.path` behind its own. Calls to several children run side by side: `start` all,
then take each `result`.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from kvxferd.die_with_parent import module_command
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.owned_process import STOP_TIMEOUT_S, OwnedProcess

Obj = TypeVar("Obj")
P = ParamSpec("P")
T = TypeVar("T")

# A call has deadlines of its own and reports them; this limit is for a child that is stuck.
CALL_TIMEOUT_S = 180.0


class ChildError(KvxferdError):
    """A call failed, or its process ended. `log_tail`: the last lines that the process printed.

    A KvxferdError of the child keeps its code and message; the message of any other exception is new, and
    its traceback is in the log.
    """

    def __init__(self, message: str, code: Code, log_tail: str) -> None:
        super().__init__(message, code)
        self.log_tail = log_tail


class Pending(Generic[T]):
    """A call that was started."""

    def __init__(self, child: ChildProcess[Any]) -> None:
        self._child = child
        self._reply: tuple[T, ChildError | None] | None = None

    def result(self, limit_s: float = CALL_TIMEOUT_S) -> T:
        """Return what the call returned. Raises ChildError for what it raised, and if its process ends.

        Raises it with `deadline` after `limit_s`; the call goes on, and `result` may be called again.
        """
        if self._reply is None:
            self._reply = self._child._receive_reply(limit_s)
        value, error = self._reply
        if error is not None:
            raise error
        return value


class ChildProcess(OwnedProcess, Generic[Obj]):
    """The process, with the object that `make` returned in it. One call runs at a time.

    `make` is called at once; what it raises, the first call raises. Of the object, where it has them,
    `progress` is called again and again between calls until it returns False, and `close` at the end.
    `environ` is the process's environment, None: that of this one. The process is killed with this one.
    """

    def __init__(self, make: Callable[[], Obj], log: Path, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(log.stem, log)
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._launch(module_command("kvxferd.tooling.child_process", str(fd)), environ, [fd])
        self._connection = Connection(ours.detach())
        self._is_paused = False
        self._in_progress: Pending[Any] | None = None
        self._connection.send([path for path in sys.path if path])
        self._made: Pending[None] = self._send(make)

    def start(
        self, method: Callable[Concatenate[Obj, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[T]:
        """Call `method` with the object in the process; `result` waits. Raises ChildError if it ended."""
        self._made.result()
        assert self._in_progress is None, f"process {self.name} has a call in progress"
        assert not self._is_paused, f"process {self.name} is paused"
        return self._send(method, *args, **kwargs)

    def call(self, method: Callable[Concatenate[Obj, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `method` with the object in the process, and return its result. Raises as `Pending.result`."""
        return self.start(method, *args, **kwargs).result()

    def pause(self) -> None:
        """Stop its execution: some processes would spin a core while others are timed."""
        self._is_paused = True
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue its execution."""
        self._is_paused = False
        self.send_signal(signal.SIGCONT)

    def begin_stop(self) -> None:
        """Have it close its object and end; kill it where a call is in progress that nobody waits for."""
        self._connection.close()
        if self._in_progress is not None and self._in_progress is not self._made:
            self._process.kill()
        self.resume()

    def _send(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending[Any]:
        self._in_progress = Pending(self)
        with suppress(ConnectionError):  # it ended: there is no reply either
            self._connection.send((function, args, kwargs))
        return self._in_progress

    def _receive_reply(self, limit_s: float) -> tuple[Any, ChildError | None]:
        try:
            if not self._connection.poll(limit_s):
                raise ChildError(
                    f"cannot go on: process {self.name} has not replied for {limit_s:g} s",
                    Code.DEADLINE,
                    self.log_tail(),
                )
            value, failure = self._connection.recv()
        except (EOFError, ConnectionError):
            self._in_progress = None
            ended, tail = self._wait_or_kill(STOP_TIMEOUT_S), self.log_tail()
            return None, ChildError(
                f"cannot go on: process {self.name} ended with {ended}: {tail}", Code.INTERNAL, tail
            )
        self._in_progress = None
        if failure is None:
            return value, None
        message, code = failure
        return None, ChildError(message, code, self.log_tail())


def main() -> None:
    """Serve the calls of the parent until it closes its end, a descriptor that the argument names."""
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    with Connection(fd) as connection:
        sys.path += [path for path in connection.recv() if path not in sys.path]
        _serve(connection)


def _serve(connection: Connection) -> None:
    made: tuple[Any, ...] = ()  # the object, which the first call makes
    progress: Callable[[], bool] = bool  # of an object that has none: False
    arrivals = select.poll()
    arrivals.register(connection.fileno(), select.POLLIN)
    while True:
        while progress() and not arrivals.poll(0):
            pass
        try:
            request = connection.recv_bytes()
        except (EOFError, ConnectionError):
            break
        try:
            # A tool and its own child: nobody else has an end of this pair.
            function, args, kwargs = pickle.loads(request)
            value = function(*made, *args, **kwargs)
            reply = pickle.dumps((value if made else None, None))
            if not made:
                made, progress = (value,), getattr(value, "progress", progress)
        except KvxferdError as error:
            reply = pickle.dumps((None, (error.message, error.code)))
        except Exception as error:
            traceback.print_exc()
            reply = pickle.dumps((None, (f"cannot go on: {type(error).__name__}: {error}", Code.INTERNAL)))
        sys.stdout.flush()
        connection.send_bytes(reply)
    if made and hasattr(made[0], "close"):
        made[0].close()


if __name__ == "__main__":
    main()
