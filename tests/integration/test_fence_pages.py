"""Fence pages that nobody can use, from other users and from the engine's own: real daemons and movers."""

from __future__ import annotations

import fcntl

from kvxferd.errors import Code
from kvxferd.wire import worker
from kvxferd.wire.common import Versions
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check
from tests.support.other_user import NOBODY, needs_root, open_directory, run_as
from tests.support.raw_worker import Raw

F_SEAL_FUTURE_WRITE = getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)  # named from Python 3.13 on
OLDEST = Versions(1, 1)  # a client of version 1 brings its own page

# Says hello with a page that is sealed in the way given, and prints what it is told.
SQUATTER = """
page = os.memfd_create("page", os.MFD_ALLOW_SEALING)
os.ftruncate(page, 65536)
fcntl.fcntl(page, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | int(sys.argv[2]))
connected = socket.socket(socket.AF_UNIX)
connected.connect(sys.argv[1])
hello = encode(worker.Hello(versions=Versions(1, 1), client="squatter"))
socket.send_fds(connected, [encode_frame(hello, 1)], [page])
link = FrameSocket(connected)
while not (frames := link.receive()):
    select.select([link], [], [], 10)
print(DAEMON_MESSAGES.decode(frames[0].payload).code)
"""
IMPORTS = """
import fcntl
from kvxferd.wire import worker
from kvxferd.wire.codec import DAEMON_MESSAGES, encode
from kvxferd.wire.common import Versions
from kvxferd.wire.framing import encode_frame
from kvxferd.frame_socket import FrameSocket
"""


@needs_root
def test_a_page_sealed_against_writing_ends_its_session_at_hello():
    with open_directory() as directory:
        fleet = Fleet(directory)
        try:
            path = fleet.daemon("node", "--worker-mode", "0o666").worker_socket
            said = run_as(SQUATTER, path, str(F_SEAL_FUTURE_WRITE), uid=NOBODY, imports=IMPORTS)
        finally:
            fleet.stop()
    assert said.split() == ["region-invalid"]


def test_a_page_that_its_movers_cannot_map_ends_its_session_and_no_mover(fleet: Fleet):
    """Checked at hello, sealed afterwards: the engine goes on with the mover that it has."""
    daemon = fleet.shared("node")
    source, sink = fleet.pair(daemon)
    movers = _movers_of_ranks(daemon)
    bad = Raw(daemon.worker_socket, hello=False)
    bad.say(worker.Hello(versions=OLDEST, client="raw"), bad.fence.fd)
    assert isinstance(bad.next(), worker.Welcome)
    fcntl.fcntl(bad.fence.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    bad.say(worker.Attach(request=1, engine_id="prefill", generation=fleet.generation()))
    farewell = bad.farewell()
    assert farewell.code is Code.REGION_INVALID
    assert "fence page" in farewell.message
    bad.fence.close()
    pull_and_check([sink], publish([source], 1), 1)
    assert _movers_of_ranks(daemon) == movers


def _movers_of_ranks(daemon: Daemon) -> list[str]:
    ranks = [rank for engine in daemon.status()["engines"] for rank in engine["ranks"]]
    return sorted(rank["agent"] for rank in ranks)
