"""What UCX says of how it connects; the lines are those of UCX 1.23 on machines where it was tried."""

from __future__ import annotations

import pytest

from kvxferd.ucx_log import (
    TransportsUsed,
    UcxLine,
    data_transports,
    is_slow_on_node,
    parse_line,
    parse_transports,
)

HEAD = "[1795272844.132412] [vm:12239:0]      "
CMA = (
    "ucp_worker.c:1997 UCX  INFO    dst/1 intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)"
)


def test_a_line_says_whose_it_is_and_how_it_connects() -> None:
    line = parse_line(HEAD + CMA)
    assert line is not None
    assert (line.pid, line.level) == (12239, "INFO")
    assert parse_transports(line.text) == TransportsUsed("node", ("tcp/lo", "cma/memory"))
    padded = parse_line("[1795273373.826581] [vm:1    :0]   parser.c:2587 UCX  WARN  unused variable: UCX_X")
    assert padded == UcxLine(1, "WARN", "unused variable: UCX_X")
    assert parse_transports(padded.text) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "E1121 15:02:56.519658   16273 ucx_utils.cpp:635] nixlUcxWorker dst:0: UCX endpoint create failed",
        "[vm:12239:0] UCX INFO no time",
        "Traceback (most recent call last):",
    ],
)
def test_what_others_say_is_not_ucx(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    ("text", "reach", "data"),
    [
        ("a self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)", "itself", "cma"),
        ("a intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo tcp/eth0)  ka(tcp/lo)", "node", "tcp"),
        ("a inter-node cfg#2 am(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1) ka(ud_mlx5/mlx5_0:1)", "network",
         "rc_mlx5/mlx5_0:1, rc_mlx5/mlx5_1:1"),
        ("a intra-node cfg#1 rma(sysv/memory cma/memory cuda_ipc/cuda)", "node", "cma, cuda_ipc/cuda"),
        ("a inter-node cfg#3 am(tcp/eth0) cm(rc_mlx5/mlx5_0:1)", "network", "tcp"),
    ],
)  # fmt: skip
def test_data_goes_over_the_best_that_is_there(text: str, reach: str, data: str) -> None:
    lanes = parse_transports(text)
    assert lanes is not None
    assert (lanes.reach, data_transports(lanes.transports)) == (reach, data)
    assert data_transports(()) == "", "nothing is known before a connection"


@pytest.mark.parametrize(
    ("itself", "node", "slow"),
    [
        (("tcp/lo", "cma/memory"), ("tcp/lo", "tcp/eth0"), True),  # another user, or another PID namespace
        (("tcp/lo", "cma/memory"), ("tcp/lo", "cma/memory"), False),
        (("tcp/lo", "cma/memory"), ("tcp/lo", "rc_mlx5/mlx5_0:1"), False),  # a card's loopback
        (("tcp/lo", "cma/memory"), (), False),  # nobody was read yet
        (("tcp/lo",), ("tcp/lo",), False),  # the operator has it so, or the kernel: doctor says which
    ],
)
def test_a_slow_path_is_one_that_could_be_faster(itself, node, slow) -> None:
    assert is_slow_on_node(itself, node) is slow
