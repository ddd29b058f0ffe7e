"""What is sent of a probe: a region of random bytes that the other node reads, and how it was read."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from kvxferd.errors import ProtocolError
from kvxferd.ids import AgentName
from kvxferd.wire.bounds import NAME
from kvxferd.wire.limits import (
    MAX_ADDRESS,
    MAX_PROBE_BYTES,
    MAX_PROBE_METADATA_BYTES,
    MIN_PROBE_BYTES,
    PROBE_SLICE_BYTES,
)

DIGEST_BYTES = 32  # SHA-256
# A region is read so often at most. One read of 64 MiB takes 5 ms over the fastest links known.
MAX_PROBE_PASSES = 8
MAX_BYTES_PER_S = 1e14  # a hundred times what the memory of one machine moves
MAX_DIGESTS_BYTES = DIGEST_BYTES * (MAX_PROBE_BYTES // PROBE_SLICE_BYTES)

ProbeSize = Annotated[int, msgspec.Meta(ge=MIN_PROBE_BYTES, le=MAX_PROBE_BYTES)]


class ProbeRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of a mover that another mover may read, with the digest of each slice of it."""

    agent: Annotated[AgentName, NAME]
    address: Annotated[int, msgspec.Meta(ge=0, le=MAX_ADDRESS)]
    size_bytes: ProbeSize
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_PROBE_METADATA_BYTES)]
    digests: Annotated[bytes, msgspec.Meta(max_length=MAX_DIGESTS_BYTES)]  # SHA-256, one after another

    def check(self, max_bytes: int) -> None:
        """Raise ProtocolError where the fields contradict each other, or `max_bytes`."""
        if self.size_bytes > max_bytes or len(self.digests) != DIGEST_BYTES * num_slices(self.size_bytes):
            raise ProtocolError(
                f"cannot read a probe region of {self.size_bytes} bytes with {len(self.digests)} bytes of "
                f"digests: {max_bytes} bytes were requested"
            )


class ProbeRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a probe region was read, as its reader measured it."""

    verified_bytes: Annotated[int, msgspec.Meta(ge=0)]  # as the source has them
    wrong_bytes: Annotated[int, msgspec.Meta(ge=0)]  # in slices that differ from the source's
    wire_s: float  # of all passes, the first slice excepted
    wire_bytes: Annotated[int, msgspec.Meta(ge=0)]  # that were read in that time
    first_s: float  # of the first slice, which connects
    transports: Annotated[str, NAME] = ""  # that carried the bytes; "": not known
    reach: Annotated[str, NAME] = ""  # "node": both movers are on one machine; "network"; "": not known
    is_slow: bool = False  # TCP, although the reader's machine has a faster transport for its own processes

    def check(self, size_bytes: int) -> None:
        """Raise ProtocolError for numbers that no reader of a region of `size_bytes` measures."""
        times = (self.wire_s, self.first_s)
        read_bytes = self.verified_bytes + self.wrong_bytes
        is_possible = (
            all(math.isfinite(time) and 0 <= time < 1e6 for time in times)
            and 0 < read_bytes <= size_bytes * (MAX_PROBE_PASSES + 1)
            and self.wire_bytes <= min(read_bytes, self.wire_s * MAX_BYTES_PER_S)
        )
        if not is_possible:
            raise ProtocolError("cannot use the result of a probe: its numbers are impossible")

    @property
    def gigabytes_per_s(self) -> float:
        """Return the speed of the passes; 0 where none was timed."""
        return self.wire_bytes / self.wire_s / 1e9 if self.wire_s > 0 else 0.0


def num_slices(size_bytes: int) -> int:
    """Return how many slices a region of that size has; the last one may be shorter."""
    return -(-size_bytes // PROBE_SLICE_BYTES)
