"""SGLang's own pools, without a model: every name that is relied on is there, and layouts move."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from kvxferd.integrations.sglang.layout.support import POOLS
from kvxferd.integrations.sglang.transfers import State
from tests.support.repository import ROOT
from tests.support.sglang_servers.engines import ENVIRONMENT, STAND_INS

NAMES = {
    "Failed": State.FAILED,
    "Bootstrapping": State.BOOTSTRAPPING,
    "WaitingForInput": State.WAITING,
    "Transferring": State.TRANSFERRING,
    "Success": State.SUCCESS,
}


CASES = (
    "plain,1,1,1",
    "plain,2,1,16",
    "plain,1,4,16",
    "plain,4,2,8",
    "latent,2,1,16",
    "latent,1,2,1",
    "window,1,1,16",
    "window,2,1,8",
)  # the kind of pool, tensor-parallel sizes of source and sink, tokens of a page


@pytest.fixture(scope="module")
def replies(python: str) -> dict[str, Any]:
    """What SGLang's interpreter replies, which takes long to import it and so is asked once."""
    command = [python, "tests/support/sglang_introspection.py", *CASES]
    environ = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{STAND_INS}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_every_name_that_is_relied_on_is_there(replies: dict[str, Any]) -> None:
    assert replies["contract"] == []
    assert replies["states"] == NAMES


def test_every_pool_is_described_or_refused_by_name(replies: dict[str, Any]) -> None:
    """A new version's pools are in no table yet: an engine with one says so, and this test names them."""
    found = set(replies["pools"])
    assert {name for name, one in POOLS.items() if one.describer} <= found
    assert found - set(POOLS) == set()


@pytest.mark.parametrize("case", CASES)
def test_a_pools_bytes_move(replies: dict[str, Any], case: str) -> None:
    """Written and looked at through SGLang's own views, token by token."""
    assert replies[case]["checked"] > 5 * int(case.rpartition(",")[2])
    assert replies[case]["wrong"] == 0
