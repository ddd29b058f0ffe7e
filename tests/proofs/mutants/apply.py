"""python -m tests.proofs.mutants.apply MUTANT MODULE [ARG...]: run a module with a planted bug."""

from __future__ import annotations

import importlib
import resource
import runpy
import sys

from tests.proofs.mutants.generate import named
from tests.proofs.mutants.mutant import all_mutants, plant

# A bug may be a loop that fills a list. An episode of the simulation maps 4 GiB and more, of which it touches
# 0.1: at that limit a thread could not be started, and the mutant counted as noticed.
MAX_MEMORY_BYTES = 16 << 30


def main() -> None:
    """Plant the bug, load its module, which another may not need, and run the module."""
    name, module, *rest = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    mutant = all_mutants().get(name) or named(name)
    plant(mutant)
    importlib.import_module(mutant.module)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


main()
