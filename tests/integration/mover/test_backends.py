"""The setting `mover.backend` against the installed library: refusals at start, and bytes that move."""

from __future__ import annotations

import pytest

from kvxferd.errors import Code, MoverError
from kvxferd.mover.backends import STORAGE_BACKENDS, Backend
from kvxferd.mover.transport.nixl import import_library
from tests.support.mover_harness import Node


async def test_a_backend_that_cannot_be_used_is_refused_at_start() -> None:
    async with Node("here", backend=Backend("POSIX")) as node:
        with pytest.raises(MoverError) as refused:
            await node.acquire()
        assert refused.value.code is Code.NIXL_UNAVAILABLE
        assert refused.value.message == node.unavailable
        assert "cannot use mover.backend = POSIX: " in refused.value.message
        for plugin in set(import_library().plugins()) - STORAGE_BACKENDS:
            assert plugin in refused.value.message


async def test_a_parameter_that_the_backend_refuses_ends_the_registration() -> None:
    async with Node("here", backend=Backend("UCX", {"ucx_error_handling_mode": "no such mode"})) as node:
        with pytest.raises(MoverError):
            await node.acquire()
