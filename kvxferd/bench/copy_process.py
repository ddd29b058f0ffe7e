"""A plain memory copy between the same two regions: an upper bound that no transport beats by much.

`python -m kvxferd.bench.copy_process` handles commands from standard input until it is closed.
"""

from __future__ import annotations

import time

from kvxferd.bench import protocol
from kvxferd.bench.cases import runs_of
from kvxferd.bench.shapes import FIRST_RANK
from kvxferd.bench.shared_memory import map_process_memory
from kvxferd.errors import KvxferdError
from kvxferd.memory import Mapping
from kvxferd.tooling.command_loop import serve_commands


class CopyCommandHandler:
    """Copies between both sides' memory, which it maps."""

    def __init__(self) -> None:
        self._sink: Mapping | None = None
        self._source: Mapping | None = None
        self._size_bytes = 0

    def handle(self, command: protocol.Command) -> protocol.Reply:
        """Handle one command."""
        match command:
            case protocol.AttachMemory():
                self.close()
                self._size_bytes = command.deployment.region_bytes
                self._sink = map_process_memory(command.memory, self._size_bytes)
                return protocol.MemoryAttached(metadata="", address=self._sink.address)
            case protocol.MapSourceMemory():
                self._source = map_process_memory(command.memory, self._size_bytes)
                return protocol.Done()
            case protocol.Move():
                return protocol.Moved(samples=self._copy(command))
            case _:
                raise KvxferdError(f"cannot handle {type(command).__name__}: this process only copies")

    def progress(self) -> bool:
        """Return False: there is no work between commands."""
        return False

    def close(self) -> None:
        """Unmap both regions."""
        for mapping in (self._sink, self._source):
            if mapping is not None:
                mapping.unmap()
        self._sink = self._source = None

    def _copy(self, command: protocol.Move) -> list[protocol.Sample]:
        assert self._sink is not None and self._source is not None
        sink, source = self._sink.view(), self._source.view()
        case = command.case
        samples = []
        for number in range(command.count):
            runs = runs_of(case, FIRST_RANK, number % case.slots)
            total = int(runs.length.sum())
            if command.as_one:
                pieces = [(0, 0, total)]
            else:
                pieces = list(zip(*(column.tolist() for column in runs), strict=True))
            began = time.perf_counter()
            for here, there, length in pieces:
                sink[here : here + length] = source[there : there + length]
            ended = time.perf_counter()
            samples.append(protocol.Sample(began, began, ended, ended, total, len(pieces)))
        return samples


if __name__ == "__main__":
    serve_commands(protocol.PROTOCOL, CopyCommandHandler)
