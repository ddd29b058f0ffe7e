"""Connect an engine to the daemon of its node, and open its scheduler's session as a publisher."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

from kvxferd.client import Publisher
from kvxferd.errors import Code, EngineError
from kvxferd.integrations.vllm.options import Options, connect_to_daemon
from kvxferd.integrations.vllm.session.step_metadata import EngineReport

_LOG = logging.getLogger("vllm.kvxferd.scheduler")

# A daemon that was restarted a moment ago has its ranks back within two seconds. On a node without any rank
# of the engine they never come, and the engine's start waits for so long.
RANKS_BACK_S = 5.0


def open_publisher(options: Options, engine: EngineReport) -> Publisher:
    """Return the publisher of an engine whose ranks are registered. Blocks. Raises KvxferdError."""
    deadline = time.monotonic() + options.connect_timeout_s
    connection = connect_to_daemon(options, f"vllm {engine.engine_id} scheduler", deadline)
    try:
        return connection.attach(engine.engine_id, engine.generation)
    except BaseException:
        connection.close()
        raise


def open_publisher_by_id(options: Options, engine_id: str, tag: str) -> Publisher | None:
    """Return the publisher of the engine's newest generation, whose ranks are registered. Blocks.

    Returns None where the newest does not begin with `tag`, or there is no tag: it may be another start of
    the engine, and block ids of this one name other tokens in its memory. None too where the daemon has no
    rank of the engine within `RANKS_BACK_S`, or is too old to be asked for a generation. Raises KvxferdError
    where there is no daemon.
    """
    if not tag:
        _LOG.warning("publishing begins after the first step: this vLLM does not name its starts")
        return None
    deadline = time.monotonic() + options.connect_timeout_s
    ranks_deadline = min(deadline, time.monotonic() + RANKS_BACK_S)
    connection = connect_to_daemon(options, f"vllm {engine_id} scheduler", deadline)
    while True:
        try:
            publisher = connection.attach(engine_id, timeout_s=max(1.0, deadline - time.monotonic()))
            break
        except EngineError as error:
            may_come = error.code is Code.ENGINE_UNKNOWN and error.retry_after_s > 0
            if not may_come or time.monotonic() + error.retry_after_s > ranks_deadline:
                connection.close()
                _LOG.warning("publishing begins after the first step: %s (%s)", error.message, error.code)
                return None
            time.sleep(error.retry_after_s)  # engine start: nothing else waits for this thread
        except BaseException:
            connection.close()
            raise
    if not publisher.generation.startswith(tag):
        _LOG.warning("publishing begins after the first step: the daemon has another start of engine %s, %s",
                     engine_id, publisher.generation)  # fmt: skip
        publisher.close()
        return None
    return publisher


def open_publisher_in_thread(options: Options, engine: EngineReport) -> Future[Publisher]:
    """Open the publisher in a thread, for an engine that runs already. Errors are the future's."""
    pending: Future[Publisher] = Future()

    def work() -> None:
        try:
            pending.set_result(open_publisher(options, engine))
        except Exception as error:
            pending.set_exception(error)

    # A daemon thread: an engine that exits does not wait for a daemon that is not running.
    threading.Thread(target=work, name="kvxferd-attach", daemon=True).start()
    return pending
