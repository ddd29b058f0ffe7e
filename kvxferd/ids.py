"""Ids and names: one type for each kind, so that mypy tells them apart."""

from typing import NamedTuple, NewType

EngineId = NewType("EngineId", str)  # one model replica, as its deployment names it
Generation = NewType("Generation", str)  # new each time the engine starts
TransferId = NewType("TransferId", str)  # one request's cache, as the prefill engine names it
RegionId = NewType("RegionId", str)  # one exported allocation of a rank
GroupName = NewType("GroupName", str)  # layers whose blocks are allocated together; local to an engine
AgentName = NewType("AgentName", str)  # a NIXL agent: "boot-id/mover-incarnation"
BootId = NewType("BootId", str)  # new each time a daemon starts
Incarnation = NewType("Incarnation", str)  # new each time a worker's memory is mapped
Endpoint = NewType("Endpoint", str)  # "tcp://host:port" of a daemon's peer socket
Digest = NewType("Digest", str)  # blake2b-128 of a canonical encoding, in hex

SessionId = NewType("SessionId", int)  # one connection on the worker socket
MoverId = NewType("MoverId", int)  # one mover of this daemon, never reused
PullId = NewType("PullId", int)  # one pull of this daemon, never reused
Ticket = NewType("Ticket", int)  # one pull, as its client numbers it
GrantId = NewType("GrantId", str)  # one reader's entry on a transfer's lease


class Rank(NamedTuple):
    """A worker's place in its engine: pipeline stage, then tensor-parallel rank within it."""

    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"pp{self.pp_rank}.tp{self.tp_rank}"


class EngineKey(NamedTuple):
    """One start of one engine."""

    engine_id: EngineId
    generation: Generation

    def __str__(self) -> str:
        return f"{self.engine_id}@{self.generation}"
