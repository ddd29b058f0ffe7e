"""The trace of a vLLM request: from its headers, or from the router's parameters; and the example router."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvxferd.client import TransferRef
from kvxferd.integrations.vllm.session.request_params import params_for_decode, traceparent_of
from kvxferd.integrations.vllm.session.scheduler import ConnectorScheduler
from tests.support.connector_harness import GROUPS, Blocks, Request

HEADER, PARAMS, PUBLISHED = (f"00-{'1' * 32}-{digit * 16}-01" for digit in "abc")
REF = TransferRef("tcp://h:1", "p", "g", "t", "0" * 32).with_trace(PUBLISHED)  # type: ignore[arg-type]


def request(headers: Any = None, params: dict[str, Any] | None = None) -> Request:
    made = Request("r", 8, params)
    made.trace_headers = headers  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("headers", "params", "found"),
    [
        ({"traceparent": HEADER}, {"traceparent": PARAMS}, HEADER),
        ({"tracestate": "a=b"}, {"traceparent": PARAMS}, PARAMS),
        (None, {"traceparent": PARAMS}, PARAMS),
        ({"traceparent": "bad"}, {"traceparent": PARAMS}, PARAMS),
        (None, {"traceparent": 7}, ""),
        ("traceparent", {"traceparent": ["a"]}, ""),
        (None, None, ""),
    ],
)
def test_where_it_is_taken_from(headers: Any, params: dict[str, Any] | None, found: str) -> None:
    assert traceparent_of(request(headers, params)) == found


@pytest.mark.parametrize(("headers", "of_pull"), [({"traceparent": HEADER}, HEADER), (None, PUBLISHED)])
def test_a_pull_belongs_to_its_own_engines_request(headers: Any, of_pull: str) -> None:
    scheduler = ConnectorScheduler(GROUPS)
    decode = request(headers, params_for_decode(REF))
    scheduler.request_added(decode)
    (prepared,) = scheduler.build_step_metadata().prepares
    scheduler.blocks_allocated(decode, Blocks(([1, 2],)), 8)
    step = pickle.loads(pickle.dumps(scheduler.build_step_metadata()))  # as vLLM sends it to its workers
    (pull,) = step.pulls
    assert prepared.ref.traceparent == pull.ref.traceparent == of_pull
    assert pull.ref == REF


# --- the example router


@pytest.fixture(scope="module")
def router() -> ModuleType:
    path = Path(__file__).parents[5] / "examples" / "pd_router.py"
    spec = importlib.util.spec_from_file_location("pd_router", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_router_passes_the_clients_trace_to_both_engines(router: ModuleType) -> None:
    requested = SimpleNamespace(headers={"traceparent": HEADER, "tracestate": "a=b", "Cookie": "x"})
    headers = router.headers_for_engines(requested)
    assert headers.keys() == {"X-Request-Id", "traceparent", "tracestate"}
    params = router.with_trace({"do_remote_decode": True}, headers)
    assert params == {"do_remote_decode": True, "traceparent": HEADER}
    assert "traceparent" not in router.PREFILL_ONLY
    assert router.with_trace(None, headers) is None
    assert router.with_trace({"a": 1}, {}) == {"a": 1}
