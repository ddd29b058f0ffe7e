"""What a mover's process does after the fork."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
from typing import NamedTuple, NoReturn

from kvxferd.errors import KvxferdError
from kvxferd.ids import AgentName
from kvxferd.link import Link
from kvxferd.mover.loop import Mover
from kvxferd.mover.nixl_transport import Library, NixlTransport
from kvxferd.mover.pacing import Pacer
from kvxferd.mover.process import Crowd, close_all_but, die_with_parent, exit_when, prepare_thread

_LOG = logging.getLogger(__name__)


class Surroundings(NamedTuple):
    """What a mover has from its parent."""

    parent: int  # its process id
    crowd: Crowd
    keep: tuple[int, ...]  # descriptors that stay open besides the mover's own


def run(link: int, agent: AgentName, library: Library, surroundings: Surroundings) -> NoReturn:
    """Be a mover on the socket `link` until the daemon, the parent or the worker goes.

    Ends the process; never returns.
    """
    status = 1
    try:
        die_with_parent(surroundings.parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prepare_thread("kvxferd-mover")
        close_all_but((0, 1, 2, link, *surroundings.keep))
        # No events: only the hang-up, which is reported always.
        exit_when(link, 0, "lifeline")
        stream = Link(socket.socket(fileno=link))
        transport = NixlTransport(library, agent)
        pacer = Pacer(lambda: surroundings.crowd.is_crowded)
        Mover(stream, transport, pacer, _exit_with_worker).serve()
        status = 0
    except KvxferdError as error:
        _LOG.error("mover %s ends: %s", agent, error.message)
    except ConnectionError:
        status = 0  # the daemon is gone
    except BaseException:
        _LOG.exception("mover %s ends", agent)
    finally:
        # Not sys.exit: destructors of the transport library have nothing to say any more, and could hang.
        os._exit(status)


def _exit_with_worker(pidfd: int) -> None:
    exit_when(pidfd, select.POLLIN, "worker")
