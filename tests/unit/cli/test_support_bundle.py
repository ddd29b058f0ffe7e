"""`kvxferd support-bundle`: what is in it, what is missing, and that no planted secret is."""

from __future__ import annotations

import json
import os
import socket
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from zmq.utils import z85

from kvxferd.config import load_config
from kvxferd.control import http_routes
from kvxferd.control.curve_keys import make_key
from kvxferd.doctor import support_bundle
from kvxferd.telemetry.log_buffer import LogBuffer
from tests.support.verb_harness import run

SECRETS = {"token": "hunter2-of-the-movers", "password": "swordfish9", "variable": "correct-horse-battery"}


def read_bundle(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive:
            assert entry.isfile()
            assert ".." not in entry.name
            assert not entry.name.startswith("/")
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name.partition("/")[2]] = file.read()
        return found


async def bundle(path: Path, *arguments: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    done = await run(
        "support-bundle", "--no-doctor", "--json", "--output", str(path), *arguments, environ=environ
    )
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.process
async def test_no_secret_is_in_it_wherever_it_was_planted(
    tmp_path: Path, socket: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_routes, "LOG_BUFFER", log_lines := LogBuffer())
    key = make_key(tmp_path / "peer.key")
    other = make_key(tmp_path / "other.key")
    secrets = [
        *SECRETS.values(), key.secret.hex(), key.secret.hex().upper(), z85.encode(key.secret).decode(),
        other.secret.hex(),
    ]  # fmt: skip
    for secret in secrets:
        log_lines.put(json.dumps({"event": "operator request", "arguments": f"token={secret}"}))
    for secret in [SECRETS["token"], SECRETS["variable"], *secrets[3:]]:  # known, or they look like keys
        log_lines.put(f"a library printed {secret} bare", is_error=True)
    log_lines.put(f"postgres://user:{SECRETS['password']}@host/db and --password {SECRETS['password']}")
    file = tmp_path / "kvxferd.toml"
    file.write_text(
        f'[peer]\ncurve_secret_key_file = "{tmp_path / "peer.key"}"\n'
        f'curve_allowed_keys = ["{other.public}"]\n'
        f'[mover]\nenvironment = {{ HF_TOKEN = "{SECRETS["token"]}", UCX_TLS = "rc" }}\n'
        f'backend_parameters = {{ password = "{SECRETS["password"]}" }}\n'
    )
    environ = {"AWS_SECRET_ACCESS_KEY": SECRETS["variable"]}
    manifest = await bundle(tmp_path / "b.tar.gz", *socket, "--config", str(file), environ=environ)
    found = read_bundle(tmp_path / "b.tar.gz")
    everything = b"\n".join(found.values()) + json.dumps(manifest).encode()
    assert [secret for secret in secrets if secret.encode() in everything] == []
    settings = json.loads(found["configuration.json"])
    assert settings["peer.curve_secret_key_file"]["value"] == str(tmp_path / "peer.key")
    assert settings["mover.environment"]["value"] == {"HF_TOKEN": "(not shown)", "UCX_TLS": "rc"}
    shown = json.loads(found["log.json"])["lines"]
    assert sum(line.startswith("a library printed") for line in shown) == 2 + 4


@pytest.mark.process
async def test_what_it_holds_and_its_manifest(tmp_path: Path, socket: tuple[str, str]) -> None:
    manifest = await bundle(tmp_path / "b.tar.gz", *socket)
    for place in ("b.tar.gz", "none/b.tar.gz"):  # it overwrites nothing, and makes no directory
        again = await run("support-bundle", "--no-doctor", "--output", str(tmp_path / place), *socket)
        assert again.exit_code == 2
        assert "--output" in again.stderr
    found = read_bundle(tmp_path / "b.tar.gz")
    assert stat.S_IMODE((tmp_path / "b.tar.gz").stat().st_mode) == 0o600
    listed = json.loads(found.pop("manifest.json"))
    assert listed["files"] == {name: len(text) for name, text in found.items()}
    assert listed["missing"] == manifest["missing"] == {"doctor.json": "--no-doctor was given"}
    assert set(found) == {*support_bundle.ROUTES, "versions.json", "host.json", "process.json",
                          "configuration.json"}  # fmt: skip
    assert b"kvxferd_" in found["metrics.txt"]
    assert json.loads(found["process.json"])["pid"] == os.getpid()
    assert json.loads(found["status.json"])["node"]["engines"]


@pytest.mark.process
async def test_a_daemon_that_is_dead_or_hangs_costs_only_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = await bundle(tmp_path / "dead.tar.gz", "--socket", str(tmp_path / "no.sock"))
    assert set(dead["missing"]) == {*support_bundle.ROUTES, "process.json", "doctor.json"}
    assert set(dead["files"]) == {"versions.json", "host.json", "configuration.json"}

    monkeypatch.setattr(support_bundle, "RESPONSE_TIMEOUT_S", 0.5)
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "hung.sock"))
        hung.listen()
        stuck = await bundle(tmp_path / "hung.tar.gz", "--socket", str(tmp_path / "hung.sock"))
    assert set(stuck["missing"]) == {*support_bundle.ROUTES, "doctor.json"}
    assert all("does not answer" in stuck["missing"][name] for name in support_bundle.ROUTES)
    process = json.loads(read_bundle(tmp_path / "hung.tar.gz")["process.json"])
    assert process["threads"]

    broken = tmp_path / "broken.toml"
    broken.write_text("[peer]\nnothing = 1\n")
    arguments = ("--config", str(broken), "--socket", str(tmp_path / "no.sock"))
    missing = (await bundle(tmp_path / "c.tar.gz", *arguments))["missing"]
    assert "peer.nothing" in missing["configuration.json"]


def test_known_secrets_have_the_forms_in_which_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.touch()
    environ = {"A_TOKEN": '/a "b', "B_PASSWORD_FILE": str(file), "C_KEY": "", "D": "shown"}
    forms = {'/a "b', '/a \\"b', "/a%20%22b", "%2Fa+%22b"}
    assert support_bundle.known_secrets(None, environ) == forms


def test_a_fifo_as_key_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key")
    config = load_config(
        None, {}, {"peer.curve_secret_key_file": str(tmp_path / "key"), "peer.curve_allowed_keys": "any"}
    )
    assert support_bundle.known_secrets(config, {}) == set()
