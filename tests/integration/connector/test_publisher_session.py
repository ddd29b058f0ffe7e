"""The scheduler's side becomes a publisher beside an engine that runs already."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvxferd.client import Publisher, connect
from kvxferd.errors import KvxferdError
from kvxferd.integrations.vllm.options import Options
from kvxferd.integrations.vllm.session.publisher_session import (
    open_publisher,
    open_publisher_by_id,
    open_publisher_in_thread,
)
from kvxferd.integrations.vllm.session.step_metadata import EngineReport
from tests.support.connector_harness import EngineUnderTest
from tests.support.nodes.daemon import Daemon

Make = Callable[..., EngineUnderTest]


def enrolled(engine: EngineUnderTest) -> EngineReport:
    return EngineReport(engine.engine_id, engine.generation, needs_ready=False)


def test_requests_are_published_once_the_publisher_has_arrived(engine: Make, daemon: Daemon) -> None:
    prefill = engine("prefill")
    assert not prefill.scheduler.is_attached
    arriving = open_publisher_in_thread(Options(socket=daemon.worker_socket), enrolled(prefill))
    prefill.scheduler.attach_later(arriving, needs_ready=False)
    assert prefill.scheduler.is_attached, "it is not asked for twice"
    arriving.exception(20)
    assert prefill.prefill("p-1", 8, [1, 2], fill=5) is not None


def test_requests_that_end_before_are_left_to_their_reader(engine: Make, daemon: Daemon) -> None:
    prefill = engine("prefill")
    arriving: Future[Publisher] = Future()
    prefill.scheduler.attach_later(arriving, needs_ready=False)
    assert prefill.prefill("p-1", 8, [1, 2], fill=5) is None
    arriving.set_result(open_publisher(Options(socket=daemon.worker_socket), enrolled(prefill)))
    assert prefill.prefill("p-2", 8, [1, 2], fill=5) is not None


def test_the_first_request_is_published_where_only_the_engines_id_is_known(
    engine: Make, daemon: Daemon
) -> None:
    prefill = engine("prefill")
    tag = prefill.generation[:4]
    publisher = open_publisher_by_id(Options(socket=daemon.worker_socket), "prefill", tag)
    assert publisher is not None
    assert publisher.generation == prefill.generation
    prefill.scheduler.attach(publisher)
    assert prefill.prefill("p-1", 8, [1, 2], fill=5) is not None
    assert prefill.scheduler.confirm(enrolled(prefill))
    assert prefill.prefill("p-2", 8, [1, 2], fill=6) is not None


def test_an_engine_that_the_daemon_does_not_have_is_published_after_the_first_step(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    options = Options(socket=daemon.worker_socket, connect_timeout_s=0.1)
    assert open_publisher_by_id(options, "nobody", "this start") is None
    assert "publishing begins after the first step: cannot attach" in caplog.text


def test_another_start_of_the_engine_is_not_published_for(
    engine: Make, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Block ids of this start would name other tokens in that one's memory."""
    engine("prefill")
    assert open_publisher_by_id(Options(socket=daemon.worker_socket), "prefill", "this start") is None
    assert "the daemon has another start of engine prefill" in caplog.text


def test_a_start_without_a_name_is_not_published_for(
    engine: Make, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """It might be any start of the engine that the daemon has."""
    engine("prefill")
    assert open_publisher_by_id(Options(socket=daemon.worker_socket), "prefill", "") is None
    assert "this vLLM does not name its starts" in caplog.text


def test_a_publisher_of_an_earlier_start_is_replaced_and_its_requests_are_let_go(
    engine: Make, daemon: Daemon
) -> None:
    earlier, prefill = engine("prefill"), engine("another")
    tag = earlier.generation[:4]
    publisher = open_publisher_by_id(Options(socket=daemon.worker_socket), "prefill", tag)
    assert publisher is not None
    earlier.scheduler.attach(publisher)
    assert earlier.prefill("p-1", 8, [1, 2], fill=5) is not None
    present = EngineReport("prefill", prefill.generation, needs_ready=False)
    assert not earlier.scheduler.confirm(present)
    assert not earlier.scheduler.is_attached
    assert earlier.step_until(lambda results: results.sent == {"p-1"}, "the blocks are free").sent == {"p-1"}
    assert earlier.prefill("p-2", 8, [1, 2], fill=6) is None


def test_an_engine_whose_daemon_is_away_lives_on(
    engine: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = engine("prefill")
    nobody = Options(socket=str(tmp_path / "worker.sock"), connect_timeout_s=0.1)
    arriving = open_publisher_in_thread(nobody, enrolled(prefill))
    assert isinstance(arriving.exception(20), KvxferdError)
    prefill.scheduler.attach_later(arriving, needs_ready=False)
    for _ in range(2):
        prefill.step()
        assert prefill.prefill("p-1", 8, [1, 2], fill=5) is None
    said = [r.message for r in caplog.records if "nothing can be published" in r.message]
    assert len(said) == 1


def test_a_publisher_that_arrives_after_the_engine_has_stopped_is_closed(
    engine: Make, daemon: Daemon
) -> None:
    prefill = engine("prefill")
    arriving: Future[Publisher] = Future()
    prefill.scheduler.attach_later(arriving, needs_ready=False)
    prefill.scheduler.close()
    late = connect(daemon.worker_socket).attach(prefill.engine_id, prefill.generation)
    arriving.set_result(late)
    with pytest.raises(KvxferdError):
        late.publish("p-1", {}, 0)
