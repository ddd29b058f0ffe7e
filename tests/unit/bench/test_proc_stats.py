"""What the kernel counts: processor time, and memory without what is exported."""

import mmap
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from kvxferd.bench import proc_stats
from kvxferd.memory import SealedMemory

MIB = 1 << 20


def test_exported_memory_is_not_private() -> None:
    before = proc_stats.private_bytes(os.getpid())
    with SealedMemory.create(64 * MIB) as memory:
        np.frombuffer(memory.buffer, dtype=np.uint8)[:] = 1
        assert proc_stats.private_bytes(os.getpid()) - before < 8 * MIB
        assert proc_stats.resident_bytes(os.getpid()) > 64 * MIB


def test_own_memory_is_private() -> None:
    before = proc_stats.private_bytes(os.getpid())
    # A mapping of its own: malloc may return what earlier tests have freed, which counts already.
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"\1" * (64 * MIB))
        assert proc_stats.private_bytes(os.getpid()) - before > 56 * MIB


def test_processor_time_is_counted() -> None:
    before = proc_stats.cpu_seconds(os.getpid())
    began = time.thread_time()
    while time.thread_time() - began < 0.05:
        pass
    assert proc_stats.cpu_seconds(os.getpid()) - before >= 0.05


@pytest.mark.process
def test_a_tree_is_the_process_and_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            tree = proc_stats.process_tree(os.getpid())
        finally:
            child.communicate(b"\n")
    assert tree[0] == os.getpid()
    assert child.pid in tree
