"""`kvxferd config`: what is printed, from where each setting comes, and what is never printed."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from kvxferd.config import SETTINGS, load_config
from kvxferd.config.sample import sample_text
from tests.support.node_samples import StillNode
from tests.support.verb_harness import run


async def test_the_defaults_are_the_sample_with_its_comments_and_as_json_its_values() -> None:
    result = await run("config", "defaults")
    assert (result.exit_code, result.stdout) == (0, sample_text())
    sample = tomllib.loads(sample_text())
    want = {f"{section}.{key}": value for section, table in sample.items() for key, value in table.items()}
    assert json.loads((await run("config", "defaults", "--json")).stdout) == want


async def test_a_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text('[transfer]\nlease = 3\n[log]\nlevel = "loud\\u001b[2J"\n')
    result = await run("config", "check", str(file))
    assert result.exit_code == 1
    _, first, second = result.stdout.splitlines()
    assert first.startswith("  cannot use transfer.lease ")
    assert second.startswith("  cannot use log.level ")
    assert second.endswith("give debug, info, warning or error")
    assert "\x1b" not in result.stdout
    shown = json.loads((await run("config", "check", str(file), "--json")).stdout)
    assert not shown["valid"]
    assert "transfer.lease" in shown["problem"]
    file.write_text("[transfer]\nlease_s = 3\n")
    result = await run("config", "check", str(file))
    assert (result.exit_code, result.stdout) == (0, f"{file}: valid\n")
    assert (await run("config", "check", str(tmp_path / "none"))).exit_code == 2


async def test_each_setting_is_shown_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "k.toml"
    file.write_text("[transfer]\nlease_s = 3\nmax_hold_s = 4\n[worker]\nmode = 0o600\n")
    monkeypatch.setenv("KVXFERD_TRANSFER_LEASE_S", "2.5")
    result = await run("config", "show", "--here", "--config", str(file), "--json")
    shown = json.loads(result.stdout)["settings"]
    assert list(shown) == list(SETTINGS)
    assert shown["transfer.lease_s"] == {"value": 2.5, "source": "KVXFERD_TRANSFER_LEASE_S"}
    assert shown["transfer.max_hold_s"] == {"value": 4.0, "source": str(file)}
    assert shown["log.level"] == {"value": "info", "source": "default"}
    effective = msgspec.to_builtins(load_config(file, {"KVXFERD_TRANSFER_LEASE_S": "2.5"}, {}))
    for key, setting in shown.items():
        section, _, field = key.partition(".")
        assert msgspec.to_builtins(effective[section][field]) == setting["value"] or setting["value"] == []
    assert "0o600" in (await run("config", "show", "--here", "--config", str(file))).stdout


async def test_the_settings_of_the_daemon_are_shown_unless_it_is_not_there(
    socket: tuple[str, str], tmp_path: Path
) -> None:
    shown = json.loads((await run("config", "show", "--json", *socket)).stdout)
    assert shown["file"] == StillNode.config_path
    assert shown["settings"]["transfer.lease_s"] == {"value": 30.0, "source": "flag --transfer-lease-s"}
    assert "--transfer-lease-s" in (await run("config", "show", *socket)).stdout
    result = await run("config", "show", "--socket", str(tmp_path / "nobody.sock"))
    assert result.exit_code == 2
    assert "no daemon is there" in result.stderr


async def test_no_secret_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "daemon.key"
    key.write_text("c0ffee" * 10)
    file = tmp_path / "k.toml"
    file.write_text(
        f"[peer]\ncurve_secret_key_file = '{key}'\ncurve_allowed_keys = ['any']\n"
        "[mover.environment]\nUCX_TLS = 'tcp'\nAWS_SECRET_ACCESS_KEY = 'c0ffee'\n"
    )
    for arguments in (["config", "show", "--here"], ["config", "show", "--here", "--json"]):
        result = await run(*arguments, "--config", str(file))
        assert result.exit_code == 0, result.output
        for text in (str(key), "UCX_TLS", "tcp", "AWS_SECRET_ACCESS_KEY"):
            assert text in result.stdout
        assert "c0ffee" not in result.stdout
    monkeypatch.setenv("KVXFERD_PEER_CURVE_SECRET_KEY_FILE", "c0ffee")
    result = await run("config", "show", "--here")
    assert result.exit_code == 2
    assert "KVXFERD_PEER_CURVE_SECRET_KEY_FILE" in result.stderr
    assert "c0ffee" not in result.output
