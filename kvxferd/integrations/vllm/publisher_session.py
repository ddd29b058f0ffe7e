"""Connect an engine to the daemon of its node, and open its scheduler's session as a publisher."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from kvxferd import client
from kvxferd.client import Publisher
from kvxferd.errors import KvxferdError
from kvxferd.integrations.vllm.options import Options
from kvxferd.integrations.vllm.step_metadata import RegisteredEngine


def open_publisher(options: Options, engine: RegisteredEngine) -> Publisher:
    """Return the publisher of an engine whose ranks are registered. Blocks. Raises KvxferdError."""
    deadline = time.monotonic() + options.connect_timeout_s
    connection = connect_to_daemon(options, f"vllm {engine.engine_id} scheduler", deadline)
    try:
        return connection.attach(engine.engine_id, engine.generation)
    except BaseException:
        connection.close()
        raise


def open_publisher_in_thread(options: Options, engine: RegisteredEngine) -> Future[Publisher]:
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


def connect_to_daemon(options: Options, name: str, deadline: float) -> client.Client:
    """Return a connection to the node's daemon. Raises KvxferdError; its message has the command to start."""
    try:
        return client.connect(options.socket, timeout_s=max(1.0, deadline - time.monotonic()), name=name)
    except KvxferdError as error:
        raise KvxferdError(
            f"{error.message}; start `kvxferd serve` on this node, or name its worker socket in "
            'kv_connector_extra_config: {"socket": ...}',
            error.code,
        ) from error
