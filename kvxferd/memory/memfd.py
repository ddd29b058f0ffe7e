"""Memory to export: a sealed memfd that is mapped in this process."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from types import TracebackType
from typing import TYPE_CHECKING

from kvxferd.memory.mapped_files import remember_sealed

if TYPE_CHECKING:
    import torch

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SealedMemory:
    """Zeroed memory that another process may map, and that cannot shrink meanwhile."""

    def __init__(self, fd: int, buffer: mmap.mmap) -> None:
        self.fd = fd
        self.buffer = buffer
        remember_sealed(self)

    @classmethod
    def create(cls, size_bytes: int, name: str = "kvxferd") -> SealedMemory:
        """Allocate memory. `name` is shown in /proc/PID/maps. Raises ValueError or OSError."""
        if size_bytes <= 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, mmap.mmap(fd, size_bytes))
        except BaseException:
            os.close(fd)
            raise

    @property
    def size_bytes(self) -> int:
        """The size that it was created with."""
        return len(self.buffer)

    def torch(self) -> torch.Tensor:
        """Return the memory as a one-dimensional uint8 tensor; it keeps the mapping alive."""
        import torch

        # torch keeps the object alive but not its buffer locked: given the mmap itself, `close` would
        # unmap memory that tensors still use.
        held = (ctypes.c_char * self.size_bytes).from_buffer(self.buffer)
        held.memory = self  # type: ignore[attr-defined]  # so that `share` finds it while a tensor lives
        return torch.frombuffer(held, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor, and the mapping unless tensors or views still use it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        try:
            self.buffer.close()
        except BufferError:
            # A tensor over it lives: the mapping goes with the last of them.
            return

    def __enter__(self) -> SealedMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
