"""The kernel's features that kvxferd needs: sealed memory that another process maps, and pidfds."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

from kvxferd.doctor.finding import CheckContext, Finding, fail, ok
from kvxferd.errors import KvxferdError
from kvxferd.memory import SealedMemory, check_memfd, map_memfd

_SIZE = 1 << 16


def check(node: CheckContext) -> Iterator[Finding]:
    """Use the system calls of a registration."""
    release = platform.release()
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        yield fail(
            "kernel",
            f"{release}: pidfd_open fails: {error.strerror}",
            "run a kernel of 5.3 or newer, without a seccomp filter that forbids pidfd_open",
            essential=True,
        )
    else:
        yield ok("kernel", f"{platform.system()} {release}, {platform.machine()}", release=release)
    try:
        with SealedMemory.create(_SIZE, "kvxferd-doctor") as memory:
            check_memfd(memory.fd, _SIZE)
            mapping = map_memfd(memory.fd, _SIZE)
            mapping.view()[:5] = b"there"
            is_shared = memory.buffer[:5] == b"there"
            mapping.unmap()
    except (OSError, KvxferdError) as error:
        yield _memfd_failure(str(error))
        return
    yield (
        ok("sealed memory", "a sealed memfd is shared as it must be")
        if is_shared
        else _memfd_failure("what is written to one mapping of a memfd is not seen in the other")
    )


def _memfd_failure(found: str) -> Finding:
    todo = "let the sandbox or seccomp filter pass memfd_create and fcntl's seals; no cache can be registered"
    return fail("sealed memory", found, todo, essential=True)
