"""An engine id outlives its daemon: nobody has it who comes first after a restart. Real daemons and users."""

from __future__ import annotations

import json

from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.other_user import needs_root, open_directory, run_as_nobody

# Attaches to the engine, and prints what it is told.
SQUATTER = """
squatter = RawWorker(sys.argv[1])
squatter.say(worker.Attach(request=1, engine_id="prefill", generation="squatted"))
answer = squatter.await_one((worker.Registered, worker.Refused))
print(getattr(answer, "code", type(answer).__name__))
"""
IMPORTS = """
from kvxferd.wire import worker
from tests.support.raw_worker import RawWorker
"""


@needs_root
def test_who_comes_first_after_a_restart_has_nobodys_engine():
    with open_directory() as directory:
        fleet = Fleet(directory)
        try:
            daemon = fleet.daemon("node", "--worker-mode", "0o666")
            (rank,) = fleet.engine(daemon, spec_of("prefill"))
            kept = daemon.directory / "private" / "owners.json"
            wait_until(kept.exists, "kept")
            (engine_id, *_, owner), *others = json.loads(kept.read_text())
            assert (engine_id, owner, others) == ("prefill", "uid:0", [])
            daemon.kill()
            rank.stop()
            daemon.start()
            wait_until(lambda: daemon.is_ready, "ready again", 60)

            def squatted() -> str:
                return run_as_nobody(SQUATTER, daemon.worker_socket, imports=IMPORTS).strip()

            assert squatted() == "not-allowed"
            assert daemon.control.post("/v1/engines/disown", {"engine_id": "prefill"})["uid"] == 0
            assert squatted() == "Registered"
        finally:
            fleet.stop()
