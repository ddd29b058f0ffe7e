"""A process that ends when its parent ends, however that happens.

`python -m kvxferd.die_with_parent PARENT_PID MODULE [ARGUMENT...]` runs a module as such a process.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when `parent`, the process id of its parent, dies.

    The parent passes its id: `os.getppid()` is another's where the parent has died already, while the
    interpreter started say. The process then ends at once. The kernel follows the parent's thread: start such
    a process on a thread that outlives it. SIGKILL also ends one that is stopped. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot tie this process to its parent")
    if os.getppid() != parent:
        os._exit(1)  # nothing of a forked parent's is to be cleaned up


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a child of this process, which is killed with it."""
    # -P: nothing is imported from the working directory in place of what is installed. -u: a killed one
    # leaves all that it printed.
    command = [sys.executable, "-P", "-u", "-m", "kvxferd.die_with_parent", str(os.getpid())]
    return [*command, module, *arguments]


def main() -> None:
    """Tie this process to its parent, then run the module."""
    parent, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
