"""NIXL is proved by a read that is checked, and TCP told from what is faster."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvxferd.mover.transport.probe import LIMIT_S
from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.mover_harness import MARK

_SCRIPT = """
import ctypes, json, mmap, os, time
from kvxferd.mover.transport.nixl import NixlTransport, import_library
from kvxferd.mover.transport.probe import probe_span
from kvxferd.mover.transport.base import MemoryRange
transport = NixlTransport(import_library(), "me")
page = mmap.mmap(-1, 4 << 20)
page[:] = os.urandom(len(page))
span = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(page)), len(page))
transport.register(span)
began = time.perf_counter()
proof = probe_span(transport, span)
print(json.dumps([proof.ok, proof.why, proof.over_tcp, proof.gigabytes_per_s, time.perf_counter() - began]))
os._exit(0)
"""


@pytest.mark.parametrize("transports", ["", "tcp"])
def test_nixl_is_proved_and_tcp_is_told_from_what_is_faster(transports: str) -> None:
    environment = {**os.environ, "KVXFERD_TEST": MARK} | (
        {"UCX_TLS": tls_with_cuda(transports)} if transports else {}
    )
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ok, why, over_tcp, speed, elapsed_s = json.loads(done.stdout.splitlines()[-1])
    assert (ok, why) == (True, "")
    assert over_tcp == (transports == "tcp")
    assert speed > 0.01
    assert elapsed_s < 2 * LIMIT_S
