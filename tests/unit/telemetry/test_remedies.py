"""What to do about failed pulls: a sentence for each code, and commands that a shell takes as they are."""

from __future__ import annotations

import shlex

import pytest

from kvxferd.errors import Code
from kvxferd.ids import Endpoint
from kvxferd.telemetry.remedies import DEFAULT_REMEDY, REMEDIES, remedy_of

PEER = Endpoint("tcp://[fd00::7]:9441#" + "ab" * 32)


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_sentence_without_a_gap(code: Code) -> None:
    remedy = remedy_of(code, PEER, "")
    assert remedy
    assert "{" not in remedy
    assert (remedy == DEFAULT_REMEDY) == (code not in REMEDIES)


@pytest.mark.parametrize(
    ("peer", "config_path", "words"),
    [
        (PEER, "/etc/a b/k.toml", ["kvxferd", "ping", PEER, "--config", "/etc/a b/k.toml"]),
        (PEER, "", ["kvxferd", "ping", PEER]),
        ("x`$(reboot)`; '", "", ["kvxferd", "ping", "x`$(reboot)`; '"]),
        ("", "k.toml", ["kvxferd", "ping", "ENDPOINT", "--config", "k.toml"]),
    ],
)
def test_the_command_can_be_pasted(peer: Endpoint, config_path: str, words: list[str]) -> None:
    remedy = remedy_of(Code.PEER_UNREACHABLE, peer, config_path)
    command = remedy.removeprefix("run `").rpartition("`: it tells")[0]
    assert shlex.split(command) == words
