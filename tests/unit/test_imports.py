"""What an import loads, in a process of its own: what import-linter cannot see, as it follows no call."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvxferd.import_blocking import block_import

LIBRARIES = ("torch", "nixl", "rixl")
COMPLETION = """
from click.shell_completion import ShellComplete
from kvxferd.cli.root import VERBS, root
shell = ShellComplete(root, {}, "kvxferd", "_KVXFERD_COMPLETE")
shell.get_completions([], "")
"""


def loaded_by(program: str) -> set[str]:
    """Return the names of all modules that the program loads, those of the interpreter's start excepted."""
    program = (
        f"import sys; before = set(sys.modules)\n{program}\nprint(*set(sys.modules) - before, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")) - {""}


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "absent"),
    [
        # As `kvxferd serve` does, its log lines included.
        (
            "import kvxferd.cli.root, kvxferd.cli.serve as serve; serve.import_logs(); import kvxferd.daemon",
            (*LIBRARIES, "rich", "kvxferd.demo", "kvxferd.doctor", "kvxferd.bench"),
        ),
        ("import kvxferd.mover.supervisor.processes", LIBRARIES),
        ("import kvxferd.integrations.vllm.layout.derivation", (*LIBRARIES, "vllm")),
        (
            "import kvxferd.integrations.sglang.transfers, kvxferd.integrations.sglang.hooks as hooks\n"
            "import kvxferd.integrations.sglang.layout.support",
            (*LIBRARIES, "sglang"),
        ),
        # A shell completes with each press of the tab key.
        (COMPLETION, ("kvxferd.cli.serve", "kvxferd.cli.demo")),
        (
            COMPLETION + 'assert all(shell.get_completions([verb], "--") for verb in VERBS)',
            ("numpy", "rich", "asyncio", "aiohttp", "http.client", "prometheus_client", "structlog", "zmq"),
        ),
    ],
    ids=["daemon", "pool", "vllm-layout", "sglang", "verbs", "options"],
)
def test_what_is_not_loaded(program: str, absent: tuple[str, ...]) -> None:
    loaded = loaded_by(program)
    assert "kvxferd" in loaded
    assert {name for name in loaded for one in absent if f"{name}.".startswith(f"{one}.")} == set()


@pytest.mark.process
def test_the_client_loads_msgspec_and_the_standard_library_alone() -> None:
    """An engine's process has its own numpy, torch and event loop, or none."""
    loaded = {name.partition(".")[0] for name in loaded_by("import kvxferd.client")}
    # msgspec itself looks whether typing_extensions is there.
    assert loaded - sys.stdlib_module_names - {"typing_extensions"} == {"kvxferd", "msgspec"}
    assert "asyncio" not in loaded


def test_what_is_hidden_cannot_be_imported_and_can_be_later() -> None:
    with pytest.raises(ImportError), block_import("wave"):
        import wave
    import wave  # noqa: F401

    with block_import("sys"):
        import sys as again
    assert again is sys, "what is there stays"
