"""Runs part of a check in a child process with a limit, so that a crash or hang ends only that."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.child_process import ChildError, ChildProcess
from kvxferd.tooling.work_directory import make_work_directory

Obj = TypeVar("Obj")
P = ParamSpec("P")
T = TypeVar("T")

_REASON_CHARS = 300


@contextmanager
def isolated(make: Callable[[], Obj], environ: Mapping[str, str]) -> Iterator[ChildProcess[Obj]]:
    """Give the object that `make` returns in a process of its own, which is killed in the end.

    `call_isolated` has the limit, and `make` has none: let it do nothing.
    """
    directory = make_work_directory("kvxferd-doctor-")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        child = ChildProcess(make, directory / "check.log", environ)
        stack.callback(child.stop, 0.0)  # destructors of drivers and libraries could hang
        yield child


def call_isolated(
    child: ChildProcess[Obj],
    limit_s: float,
    method: Callable[Concatenate[Obj, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Return what the method returns. Raises KvxferdError with one sentence why it does not."""
    try:
        return child.start(method, *args, **kwargs).result(limit_s)
    except ChildError as error:
        raise KvxferdError(_reason(child, error, limit_s), error.code) from None


def _reason(child: ChildProcess[Any], error: ChildError, limit_s: float) -> str:
    status = child.exit_code
    if status is None:
        if error.code is Code.DEADLINE:
            return f"it has not ended within {limit_s:g} s"
        return error.message.removeprefix("cannot go on: ")
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in error.log_tail.splitlines() if line.strip()]
    return lines[-1][:_REASON_CHARS] if lines else f"it ended with status {status} and said nothing"
