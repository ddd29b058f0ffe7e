"""A process that goes when its parent goes, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(signum: signal.Signals = signal.SIGTERM) -> None:
    """Have this process sent a signal when its parent dies. Raises OSError."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot tie this process to its parent")
    if os.getppid() != parent:  # it died before the call
        raise SystemExit(0)


def main() -> None:
    """Run the `kvxferd` command line, tethered: `python -m kvxferd.cli.tether serve ...`."""
    die_with_parent()
    from kvxferd.cli import main as command_line

    sys.argv[0] = "kvxferd"
    command_line()


if __name__ == "__main__":
    main()
