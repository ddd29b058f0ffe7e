"""SGLang's own pools, without a model: every name that is relied on is there, and layouts move."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from kvxferd.integrations.sglang.layout.support import POOLS
from kvxferd.integrations.sglang.transfers import State
from tests.proofs.sglang.environment import ROOT
from tests.support.sglang_servers.engines import ENVIRONMENT, STAND_INS

NAMES = {
    "Failed": State.FAILED,
    "Bootstrapping": State.BOOTSTRAPPING,
    "WaitingForInput": State.WAITING,
    "Transferring": State.TRANSFERRING,
    "Success": State.SUCCESS,
}


def introspect(python: str, *words: str) -> Any:
    """What SGLang's interpreter replies."""
    command = [python, "tests/support/sglang_introspection.py", *words]
    environ = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{STAND_INS}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_name_that_is_relied_on_is_there(python: str) -> None:
    assert introspect(python, "contract") == []
    assert introspect(python, "states") == NAMES


def test_every_pool_is_described_or_refused_by_name(python: str) -> None:
    """A new version's pools are in no table yet: an engine with one says so, and this test names them."""
    found = set(introspect(python, "pools"))
    assert {name for name, one in POOLS.items() if one.describer} <= found
    assert found - set(POOLS) == set()


@pytest.mark.parametrize(
    ("kind", "source_tp", "sink_tp", "page_tokens"),
    [
        ("plain", 1, 1, 1),
        ("plain", 2, 1, 16),
        ("plain", 1, 4, 16),
        ("plain", 4, 2, 8),
        ("latent", 2, 1, 16),
        ("latent", 1, 2, 1),
        ("window", 1, 1, 16),
        ("window", 2, 1, 8),
    ],
)
def test_a_pools_bytes_move(python: str, kind: str, source_tp: int, sink_tp: int, page_tokens: int) -> None:
    """Written and looked at through SGLang's own views, token by token."""
    found = introspect(python, "move", kind, *map(str, (source_tp, sink_tp, page_tokens)))
    assert found["checked"] > 5 * page_tokens
    assert found["wrong"] == 0
