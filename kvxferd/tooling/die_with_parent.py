"""A process that ends when its parent ends, however that happens."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import import_module

_PR_SET_PDEATHSIG = 1


def die_with_parent(signum: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent dies. Raises OSError.

    The kernel follows the parent's thread: start such a process on a thread that outlives it. A process that
    would not end by itself names its `parent`, which may have died while the interpreter started.
    """
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot tie this process to its parent")
    if os.getppid() != parent:  # the parent died before the call
        raise SystemExit(0)


def main() -> None:
    """Run the `kvxferd` command line: `python -m kvxferd.tooling.die_with_parent PARENT_PID serve ...`."""
    die_with_parent(signal.SIGTERM, int(sys.argv.pop(1)))
    sys.argv[0] = "kvxferd"
    import_module("kvxferd.cli").main()  # by name: this package stands below the command line


if __name__ == "__main__":
    main()
