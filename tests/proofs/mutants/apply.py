"""python -m tests.proofs.mutants.apply MUTANT MODULE [ARG...]: run a module with a planted bug."""

from __future__ import annotations

import runpy
import sys

from tests.proofs.mutants.mutant import all_mutants, plant


def main() -> None:
    """Plant the bug and run the module."""
    name, module, *rest = sys.argv[1:]
    plant(all_mutants()[name])
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


main()
