"""What a lost connection proves: only where the transports are known, and known to prove it."""

from __future__ import annotations

import os

import pytest

from kvxferd.errors import Code
from kvxferd.mover.backends import DEFAULT_BACKEND, Backend
from kvxferd.mover.disconnects import (
    provable_transports,
    transports_prove_over,
    ucx_tls_proves_over,
)
from kvxferd.mover.process import pull_engine
from kvxferd.mover.supervisor.stderr_reader import StderrReader
from kvxferd.mover.transport.base import TransportError
from kvxferd.ucx_log import TransportsUsed, parse_transports
from kvxferd.wire.mover import DisconnectSeen
from tests.support.pull_engine_harness import Bench, scattered

LINE = "a %s cfg#1 %s"


def lanes(groups: str, reach: str = "intra-node") -> TransportsUsed:
    found = parse_transports(LINE % (reach, groups))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("known", "is_over"),
    [
        ([], False),  # not known at all
        (["rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)"], True),
        (["am(tcp/eth0) cm(rc_mlx5/mlx5_0:1)"], True),  # connected through a card, read over TCP
        (["am(tcp/lo cma/memory)", "am(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1) ka(ud_mlx5/mlx5_0:1)"], False),
        (["am(dc_mlx5/mlx5_0:1)"], False),
        (["am(ud_verbs/mlx5_0:1)"], False),
        (["rma(sysv/memory cma/memory cuda_ipc/cuda)"], False),
        (["rma(posix/memory)"], False),
        (["rma(gaudi_gdr/hl_0)"], False),
        (["rma(something_new/x)"], False),
        (["am(cma/memory) odd<rc_mlx5/mlx5_0:1>"], False),  # not all of the line is understood
        (["ka(tcp/lo)"], False),  # it names none that carries data
        (["am(tcp/lo cma/memory)", ""], False),
    ],
)
def test_every_connection_of_the_mover_must_prove_it(known: list[str], is_over: bool) -> None:
    assert transports_prove_over(DEFAULT_BACKEND, [lanes(groups) for groups in known]) is is_over


@pytest.mark.parametrize(
    ("setting", "is_over"),
    [
        ("tcp", True),
        ("cma,tcp,self", True),
        ("tcp,cuda_copy", True),  # which reaches no other process
        ("cuda_copy", False),
        ("tcp,cuda_ipc", False),
        (" cma , tcp", True),
        ("", False),
        ("all", False),
        ("sm,tcp", False),  # an alias, of knem and xpmem too
        ("cma,posix,sysv,self,tcp", False),
        ("^rc,dc", False),
        ("^tcp", False),
        ("tcp,rc", False),
        ("tcp,", False),
    ],
)
def test_a_setting_proves_it_where_it_leaves_nothing_else(setting: str, is_over: bool) -> None:
    assert ucx_tls_proves_over(DEFAULT_BACKEND, setting) is is_over


PROVED_BY_UCX = [lanes("am(tcp/lo cma/memory) ka(tcp/lo)"), lanes("am(self/memory cma/memory)", "self")]


@pytest.mark.parametrize(
    ("backend", "is_over"),
    [
        (Backend("UCX"), True),
        (Backend("UCX", {"ucx_devices": "eth0"}), True),
        # A read is split over workers or threads: one part's report proves nothing of another.
        (Backend("UCX", {"num_workers": "2"}), False),
        (Backend("UCX", {"num_threads": "4"}), False),
        (Backend("UCX", {"ucx_devices": "eth0", "ucx_error_handling_mode": "none"}), False),
        (Backend("UCX", {"of_a_later_version": "1"}), False),
        (Backend("LIBFABRIC"), False),
        (Backend("ucx"), False),
        (Backend("Mooncake", {"ucx_devices": "eth0"}), False),
    ],
)
def test_what_a_transport_proves_is_a_property_of_backend_and_parameters(
    backend: Backend, is_over: bool
) -> None:
    assert transports_prove_over(backend, PROVED_BY_UCX) is is_over
    assert ucx_tls_proves_over(backend, "cma,tcp,self") is is_over
    assert bool(provable_transports(backend)) is is_over


# --- in the pull engine


def lose(bench: Bench) -> None:
    """The next read from the second agent loses its connection, and what that proves is not known here."""
    bench.fabric.polls_per_read = 2
    bench.fabric.errors[bench.agents[1]] = TransportError("gone", settled=False, lost=True)


def asked(bench: Bench) -> list[int]:
    return [message.number for message in bench.reported if isinstance(message, DisconnectSeen)]


def test_a_pull_waits_for_the_answer_and_then_is_finished(bench: Bench) -> None:
    lose(bench)
    number = bench.start(scattered(8))
    bench.run()
    assert not bench.outcomes()
    (request,) = asked(bench)
    bench.disconnects.handle_reply(request, True)
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.finished, outcome.code, outcome.agent) == (True, Code.TRANSPORT, bench.agents[1])


def test_what_is_not_proved_is_in_doubt_until_the_mover_is_dead(bench: Bench) -> None:
    lose(bench)
    number = bench.start(scattered(8))
    bench.run()
    (request,) = asked(bench)
    bench.disconnects.handle_reply(request, False)
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.finished, outcome.quiesced_follows) == (False, False)
    assert bench.quiet() == []
    other = bench.start(scattered(8))
    bench.run()
    assert bench.outcomes()[other].delivered, "other pulls go on"


def test_an_answer_that_takes_long_ends_the_doubt(bench: Bench) -> None:
    lose(bench)
    number = bench.start(scattered(8))
    bench.run()
    bench.now += pull_engine.FAILED_PULL_WAIT_S
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.finished, outcome.quiesced_follows) == (False, True)
    (request,) = asked(bench)
    bench.disconnects.handle_reply(request, True)
    bench.disconnects.handle_reply(request, False)  # a second answer says nothing
    bench.disconnects.handle_reply(99, False)
    bench.run()
    assert bench.quiet() == [number]


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- the log


async def test_lines_that_may_be_lost_or_cannot_be_read_are_told() -> None:
    losses: list[int] = []
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    complaints = StderrReader(reading, lambda line: None, lambda: losses.append(1))
    os.write(writing, b"[1700000000.1] [h:1 :0] ucp_worker.c:1 UCX  INFO  a self cfg#0 am(tcp/lo)\n")
    complaints.read_available()
    assert not losses
    os.write(
        writing, b"half a sentence [1700000000.1] [h:1 :0] ucp_worker.c:1 UCX  INFO  a self cfg#0 am(rc/m)\n"
    )
    complaints.read_available()
    assert len(losses) == 1
    line = b"x" * 200 + b"\n"
    try:
        while True:
            os.write(writing, line)
    except BlockingIOError:
        pass
    complaints.read_available()
    assert len(losses) > 1
    os.close(writing)
    complaints.close()
