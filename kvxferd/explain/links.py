"""The links that times are predicted for: how long a descriptor takes, and how fast bytes move."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.plan.read_costs import START_BYTES_PER_S, START_DESCRIPTOR_S

DEFAULT_LINK = "cma"


class Link(NamedTuple):
    """The constants of a link, and where they come from."""

    descriptor_s: float
    bytes_per_s: float
    source: str


# A descriptor of a network card: 0.7 GB/s with descriptors of 1 KiB, less the time of the bytes themselves.
_RDMA_DESCRIPTOR_S = 1.4e-6
_RDMA_SOURCE = "0.7 GB/s with descriptors of 1 KiB, reported in LMCache#4161; the bandwidth is the card's"

LINKS: dict[str, Link] = {
    "cma": Link(
        START_DESCRIPTOR_S,
        START_BYTES_PER_S,
        "measured on two cores, NIXL 1.5.1: 64 MiB as 262,144 descriptors 621 ms, as one 7 ms",
    ),
    "tcp": Link(
        4.5e-6,
        1.1e9,
        "measured on two cores, NIXL 1.5.1: 64 MiB as 262,144 descriptors 1.2 to 1.9 s; long ones 1.1 GB/s",
    ),
    "100g": Link(_RDMA_DESCRIPTOR_S, 100e9 / 8, _RDMA_SOURCE),
    "400g": Link(_RDMA_DESCRIPTOR_S, 400e9 / 8, _RDMA_SOURCE),
}
