"""A process that ends when its parent ends, however that happens."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when `parent`, the process id of its parent, dies.

    The kernel follows the parent's thread: start such a process on a thread that outlives it. The process
    ends at once where the parent has died already, while the interpreter started say. SIGKILL also ends
    one that is stopped. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot tie this process to its parent")
    if os.getppid() != parent:
        os._exit(1)  # nothing of a forked parent's is to be cleaned up
