"""How much is measured: everything that was asked for, or the least that fills the summary."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.cli.bench.cases import Lists

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SMALL_BYTES = 64 * KIB
LARGE_BYTES = 2 * GIB
FIRST_BYTES = 64 * MIB
ALL_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 2 * GIB)
ALL_IN_FLIGHT = (1, 8, 64)
TRANSPORTS: dict[str, dict[str, str]] = {
    # Between processes of one user on one machine. UCX sets connections up over TCP here too.
    "cma": {"UCX_TLS": "cma,posix,sysv,self,tcp"},
    "tcp": {"UCX_TLS": "tcp,self"},
    # As the environment says: between two machines, and for those with a network card.
    "any": {},
}


@dataclass(frozen=True)
class Pulls:
    """One point of the throughput measure."""

    shape: str
    lists: Lists
    size_bytes: int
    in_flight: int


@dataclass(frozen=True)
class Effort:
    """Rounds and requests of every measure, and the points of throughput."""

    pulls: tuple[Pulls, ...]
    rounds: int
    small_per_round: int  # pulls of 64 KiB, one after the other
    calls_per_round: int  # of pull(), for each number of block ids
    first_rounds: int  # each with daemons of its own
    parallel_pulls: int  # by each of eight ranks, in each round
    behind_pulls: int  # small ones prepared for one large
    behind_bytes: int
    idle_s: float


def quick() -> Effort:
    """Return the least that fills the summary, with rounds enough for a median."""
    pulls = [Pulls("llama-3-70b", lists, size, 1) for size in (4 * MIB, 64 * MIB) for lists in Lists]
    pulls += [
        Pulls(shape, Lists.FRAGMENTED, size, 1)
        for shape in ("qwen3-8b", "deepseek-v3")
        for size in (4 * MIB, 64 * MIB)
    ]
    pulls.append(Pulls("mamba2-hybrid", Lists.FRAGMENTED, 64 * MIB, 1))
    return Effort(tuple(pulls), 7, 150, 60, 7, 64, 600, LARGE_BYTES, 5.0)


def full(
    shapes: tuple[str, ...],
    sizes: tuple[int, ...],
    lists: tuple[Lists, ...],
    in_flight: tuple[int, ...],
    rounds: int,
) -> Effort:
    """Return all combinations; those too large to be there at the same time are left out."""
    pulls = tuple(
        Pulls(shape, one, size, window)
        for shape in shapes
        for size in sizes
        for one in lists
        for window in in_flight
        if size * window <= LARGE_BYTES
    )
    return Effort(pulls, rounds, 150, 60, max(7, rounds), 32, 2000, LARGE_BYTES, 20.0)
