"""docs/how-to/vllm-gpu.md, step by step: its files and commands on two daemons of one machine.

Stand-ins: host memory for GPU memory, TCP or CMA for a card, engines without vLLM. Addresses and paths are
replaced; the rest is used as the page has it.
"""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import ExitStack
from pathlib import Path

from tests.support.connector_harness import EngineUnderTest
from tests.support.documented_commands import blocks_of, commands_of
from tests.support.http_engine import COMPLETIONS, HttpEngine, content_of
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.python_process import run_kvxferd
from tests.support.repository import ROOT
from tests.support.router_protocols import post
from tests.support.vllm_servers.router_process import RouterProcess

PAGE = ROOT / "docs" / "how-to" / "vllm-gpu.md"
COMMANDS = commands_of(PAGE)
(SETTINGS,) = blocks_of(PAGE, "toml")
PROMPT = [5, 6, 7, 8, 9, 10]


def kvxferd(*arguments: str) -> str:
    """Run a command as the page shows it, and return its output."""
    done = run_kvxferd(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def arguments_of(verb: str) -> list[str]:
    """Return the arguments of the page's first command with a verb."""
    return next(c.arguments for c in COMMANDS if c.program == "kvxferd" and c.words[1] == verb)


def make_key(path: Path) -> str:
    """Make a node's key by the page's command; returns the public key."""
    printed = kvxferd(*[str(path) if word.startswith("/") else word for word in arguments_of("keygen")])
    (key,) = re.findall("[0-9a-f]{64}", printed)
    return str(key)


def settings_of_node(directory: Path, others_key: str) -> Path:
    """Write the page's settings for a node of this machine."""
    text = SETTINGS.replace("/etc/kvxferd", str(directory))
    text = re.sub(r"[0-9a-f]{64}", others_key, text)
    text = re.sub(r"^(bind|advertise) = .*\n", "", text, flags=re.MULTILINE)
    text = text.partition("[mover.environment]")[0]  # which names cards
    path = directory / "kvxferd.toml"
    path.write_text(text)
    assert tomllib.loads(text)["peer"]["curve_allowed_keys"] == [others_key]
    return path


def test_the_walk_through(tmp_path: Path, fleet: Fleet) -> None:
    directories = [tmp_path / name for name in "pd"]
    for directory in directories:
        (directory / "keys").mkdir(parents=True)
    keys = [make_key(directory / "keys" / "peer.key") for directory in directories]
    daemons: list[Daemon] = []
    for directory, others_key in zip(directories, reversed(keys), strict=True):
        path = settings_of_node(directory, others_key)
        assert kvxferd("config", "check", str(path)).endswith(": valid\n")
        daemons.append(fleet.daemon(f"node-{directory.name}", "--config", str(path)))
    for daemon, key in zip(daemons, keys, strict=True):
        shown = kvxferd(*arguments_of("status"), "--socket", daemon.control.socket_path, "--json")
        assert json.loads(shown)["node"]["endpoint"].endswith(f"#{key}")

    with ExitStack() as stack:
        engines = []
        for daemon, name in zip(daemons, ("prefill", "decode"), strict=True):
            engine = EngineUnderTest(daemon, name, publishes=name == "prefill")
            stack.callback(engine.close)
            engines.append(HttpEngine(engine))
            stack.callback(engines[-1].close)
        prefill, decode = engines
        router = RouterProcess(prefill.url, decode.url)
        stack.callback(router.stop)
        reply = post(router.url, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 8})
        assert reply.chunks[0]["choices"][0]["token_ids"] == [content_of(PROMPT)]
        assert decode.served[0].num_pulled == len(PROMPT)
        prefill.wait_until_released(1)
        for verb in ("engines", "history"):
            kvxferd(*arguments_of(verb), "--socket", daemons[1].control.socket_path)
    for daemon in daemons:
        assert "drained" in kvxferd("drain", "--wait", "--socket", daemon.control.socket_path)
