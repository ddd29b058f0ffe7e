"""What a lost connection proves: only where the transports are known, and known to prove it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvxferd.ids import AgentName
from kvxferd.mover.backends import DEFAULT_BACKEND, Backend
from kvxferd.mover.disconnects import (
    provable_transports,
    transports_prove_over,
    ucx_tls_proves_over,
)
from kvxferd.mover.transport.base import TransportError
from kvxferd.mover.transport.nixl import NixlTransport, TransferLibrary
from kvxferd.mover.transport.runs import single_run
from kvxferd.mover.transport.ucx_lines import MAX_LINE_BYTES, UcxLines, open_output
from kvxferd.ucx_log import TransportsUsed, parse_transports

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


# --- the lines of this process

LOGGED = "[1700000000.123456] [host:4711 :0] ucp_worker.c:1997 UCX  %s  n %s cfg#1 %s\n"
TCP = LOGGED % ("INFO", "intra-node", "am(tcp/lo) ka(tcp/lo)")
CARD = LOGGED % ("INFO", "inter-node", "am(rc_mlx5/mlx5_0:1)")


class Output:
    """A mover's standard output, and what the mover reads of it."""

    def __init__(self) -> None:
        self.writing, self.reading = open_output()
        self.lines = UcxLines(self.reading, DEFAULT_BACKEND)

    def log(self, text: str) -> None:
        os.write(self.writing, text.encode())

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return os.fstat(self.reading).st_blocks * 512


@pytest.fixture
def output() -> Iterator[Output]:
    made = Output()
    yield made
    os.close(made.writing)
    os.close(made.reading)


@pytest.mark.parametrize(
    ("logged", "is_over"),
    [
        ([], False),
        ([TCP], True),
        ([TCP, "something else\n", TCP], True),
        ([TCP, CARD], False),
        ([CARD, TCP], False),
        ([TCP, CARD[:-1]], False),  # it is being written
        ([TCP, CARD[:30]], False),
        ([TCP[:70], TCP[70:]], True),
        ([TCP, "half a sentence " + TCP], False),  # whose it is cannot be read
        ([TCP, LOGGED % ("INFO", "inter-node", "am(tcp/lo) odd<rc/x>")], False),
        ([TCP, LOGGED % ("INFO", "over-the-moon", "am(tcp/lo)")], False),
        ([TCP, LOGGED % ("WARN", "inter-node", "am(tcp/lo)")], False),
        ([TCP, "x" * MAX_LINE_BYTES + CARD[:-20], CARD[-20:], TCP], False),  # it is cut
    ],
)
def test_a_disconnect_proves_what_the_lines_until_then_prove(
    output: Output, logged: list[str], is_over: bool
) -> None:
    for text in logged:
        output.log(text)
        output.lines.read()
    assert output.lines.prove_over() is is_over


def test_a_line_that_was_not_read_before_counts(output: Output) -> None:
    output.log(TCP)
    assert output.lines.prove_over()
    output.log(CARD)
    assert not output.lines.prove_over()


def test_a_line_that_was_read_and_told_before_counts(output: Output) -> None:
    output.log(CARD)
    assert not output.lines.prove_over()
    assert output.lines.take_new()
    output.log(TCP)
    assert not output.lines.prove_over(), "the card's connection may still write"


class FakeAgent:
    """An agent of the library: whatever it posts fails."""

    def __init__(self, error: str) -> None:
        self.agent = Output  # anything that can be referred to weakly
        self._error = type(error, (Exception,), {})

    def create_backend(self, name: str, parameters: dict[str, str]) -> None:
        pass

    def get_xfer_descs(self, rows: object, mem_type: str) -> object:
        return rows

    def initialize_xfer(self, *arguments: object) -> object:
        return arguments

    def transfer(self, request: object) -> str:
        raise self._error


@pytest.mark.parametrize(
    ("error", "logged", "lost", "settled"),
    [
        ("nixlRemoteDisconnectError", TCP, True, True),
        ("nixlRemoteDisconnectError", TCP + CARD, True, False),
        ("nixlRemoteDisconnectError", None, True, False),  # a resident mover has no lines of its own
        ("nixlBackendError", TCP, False, False),
    ],
)
def test_only_a_disconnect_over_known_transports_settles_a_read(
    output: Output,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    logged: str | None,
    lost: bool,
    settled: bool,
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    api = SimpleNamespace(
        nixl_agent_config=lambda **settings: None, nixl_agent=lambda name, config: FakeAgent(error)
    )
    lines = output.lines if logged is not None else None
    transport = NixlTransport(TransferLibrary(api, "fake"), AgentName("me"), ucx_lines=lines)
    output.log(logged or "")
    with pytest.raises(TransportError) as raised:
        transport.post(AgentName("there"), single_run(1, 2, 3))
    assert (raised.value.lost, raised.value.settled) == (lost, settled)


def test_no_line_is_lost_and_none_is_kept_in_memory(
    output: Output, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(20_000):
        output.log(CARD)
    output.log(TCP)
    assert output.lines.take_new() == []
    output.lines.read()
    assert [used.transports for used in output.lines.take_new()] == [("rc_mlx5/mlx5_0:1",), ("tcp/lo",)]
    assert output.lines.take_new() == [], "each kind is taken once"
    assert output.num_bytes <= 2 * mmap.PAGESIZE
    assert capfd.readouterr().err == CARD * 20_000 + TCP
