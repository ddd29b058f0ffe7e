"""The fence page: one word for each published transfer, shared by the client and its daemon."""

from __future__ import annotations

import fcntl
import os

from kvxferd.wire.limits import FENCE_PAGE_BYTES, FENCE_SLOTS, FENCE_WORD_BYTES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FencePage:
    """Words of 16 bytes that readers fetch after the data: an unchanged one proves that the blocks were held.

    Call `overwrite` before a transfer's blocks are released. Client and daemon read and write the page
    through a descriptor, and never map it: a client may punch holes into any page that it can write, and a
    process that touches a hole while memory is exhausted dies by SIGBUS. The same access by a system call is
    an OSError (and costs 0.5 us).
    """

    def __init__(self, fd: int) -> None:
        """`fd` is the page's from now on, and closed by `close`."""
        self.fd = fd

    @classmethod
    def create(cls) -> FencePage:
        """Make a page with all its memory allocated, to which no seal can be added. Raises OSError."""
        fd = os.memfd_create("kvxferd-fence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, FENCE_PAGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def write(self, slot: int, word: bytes) -> None:
        """Write a transfer's word into its slot.

        Raises ValueError for a wrong slot or length, OSError where the page was made unwritable.
        """
        if len(word) != FENCE_WORD_BYTES:
            raise ValueError(f"cannot write a fence word of {len(word)} bytes: it has {FENCE_WORD_BYTES}")
        written = os.pwrite(self.fd, word, _offset_of(slot))
        if written != FENCE_WORD_BYTES:
            raise OSError(f"{written} bytes of a fence word were written")

    def read(self, slot: int) -> bytes:
        """Return the word in a slot. Raises ValueError for a wrong slot, OSError."""
        return os.pread(self.fd, FENCE_WORD_BYTES, _offset_of(slot))

    def overwrite(self, slot: int) -> None:
        """Make the word random: from the return on, no read of the transfer counts as delivered."""
        self.write(slot, os.urandom(FENCE_WORD_BYTES))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _offset_of(slot: int) -> int:
    if not 0 <= slot < FENCE_SLOTS:
        raise ValueError(f"cannot use fence slot {slot}: there are {FENCE_SLOTS}")
    return slot * FENCE_WORD_BYTES
