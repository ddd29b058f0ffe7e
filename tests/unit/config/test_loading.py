"""The configuration: what it defaults to, who wins, and what is refused in which words."""

import tomllib
from pathlib import Path

import pytest

from kvxferd.config import SETTINGS, Config, TransferConfig, flag_name, load_config, loading
from kvxferd.errors import Code, ConfigError

KEYED = "curve_secret_key_file = '/k'\n"
EXAMPLE = Path(__file__).parents[3] / "config" / "kvxferd.toml"


def test_the_example_is_the_packages_and_holds_every_setting_at_its_default() -> None:
    assert EXAMPLE.resolve() == Path(loading.__file__).with_name("kvxferd.toml"), "a second copy could drift"
    assert load_config(EXAMPLE, {}, {}) == Config()
    tables = tomllib.loads(EXAMPLE.read_text())
    assert {f"{section}.{field}" for section, table in tables.items() for field in table} == set(SETTINGS)


def test_sockets_follow_the_run_directory_unless_set() -> None:
    moved = load_config(None, {}, {"node.run_dir": "/tmp/node-a", "control.socket": "/tmp/c.sock"})
    assert (moved.worker.socket, moved.control.socket) == ("/tmp/node-a/worker/worker.sock", "/tmp/c.sock")


def test_the_environment_wins_over_the_file_and_a_flag_over_both(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("[transfer]\nlease_s = 11\nmax_hold_s = 111\nunknown_wait_s = 1.5\n")
    environ = {"KVXFERD_TRANSFER_LEASE_S": "12", "KVXFERD_TRANSFER_MAX_HOLD_S": "112", "HOME": "/"}
    config = load_config(file, environ, {"transfer.lease_s": "13"})
    assert config.transfer == TransferConfig(lease_s=13.0, max_hold_s=112.0, unknown_wait_s=1.5)


@pytest.mark.parametrize(
    ("key", "text", "want"),
    [
        ("worker.mode", "660", 0o660),  # file modes are octal however they are written
        ("worker.mode", "0o600", 0o600),
        ("worker.allowed_uids", "1000, 1001", (1000, 1001)),
        ("worker.allowed_uids", "", ()),
        ("mover.environment", "UCX_TLS=tcp,UCX_NET_DEVICES=lo", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}),
        ("http.bind", "", ""),
        ("http.bind", "[::1]:0", "[::1]:0"),
        ("peer.pp_aware", "false", False),
        ("peer.pp_aware", "True", True),
    ],
)
def test_a_value_given_as_text(key: str, text: str, want: object) -> None:
    section, _, field = key.partition(".")
    by_flag = load_config(None, {}, {key: text})
    assert getattr(getattr(by_flag, section), field) == want
    assert load_config(None, {SETTINGS[key].variable: text}, {}) == by_flag


@pytest.mark.parametrize(("keys", "file"), [("any", ""), (f"{'ab' * 32}, {'cd' * 32}", "/more")])
def test_with_a_key_of_its_own_a_daemon_admits_any_or_those_that_are_listed(keys: str, file: str) -> None:
    flags = {"peer.curve_secret_key_file": "/k", "peer.curve_allowed_keys": keys}
    flags["peer.curve_allowed_keys_file"] = file
    assert load_config(None, {}, flags).peer.curve_allowed_keys == tuple(keys.split(", "))


@pytest.mark.parametrize(
    ("toml", "names"),
    [
        ("[transfer]\nlease = 3", ["transfer.lease", "lease_s"]),  # an unknown key: told the real ones
        ("[transfers]\nlease_s = 3", ["transfers", "transfer,"]),  # an unknown table
        ("lease_s = 3", ["lease_s"]),  # a key outside any table
        ("[transfer]\nlease_s = -3", ["transfer.lease_s", "-3", "0.01 to 86400"]),
        ("[transfer]\nlease_s = nan", ["transfer.lease_s", "nan"]),
        ("[transfer]\nlease_s = '30'", ["transfer.lease_s", "'30'"]),  # text is no number in a file
        ("[transfer]\nlease_s = 900", ["transfer.max_hold_s", "transfer.lease_s"]),
        ("[worker]\nmode = true", ["worker.mode"]),
        ("[worker]\nmode = 660", ["worker.mode", "0o660"]),  # decimal, by mistake
        ("[worker]\nallowed_uids = ['root']", ["worker.allowed_uids", "numeric"]),
        ("[worker]\nsocket = 'run/w.sock'", ["worker.socket", "absolute"]),
        ("[worker]\nsocket = '/run/kvxferd/control.sock'", ["control.socket", "worker.socket"]),
        (f"[node]\nrun_dir = '/{'x' * 100}'", ["worker.socket", "107", "node.run_dir"]),
        ("[peer]\nbind = 'localhost:9441'", ["peer.bind", "tcp://host:port"]),
        ("[peer]\nbind = 'tcp://0.0.0.0:65536'", ["peer.bind", "tcp://host:port"]),
        ("[peer]\nbind = 'tcp://0.0.0.0:9441'", ["peer.bind", "peer.advertise"]),
        ("[peer]\nadvertise = 'tcp://*:9441'", ["peer.advertise"]),
        ("[peer]\nadvertise = 'tcp://node-7:0'", ["peer.advertise"]),
        (f"[peer]\n{KEYED}curve_allowed_keys = ['any', '{'ab' * 32}']", ["stands alone"]),
        (f"[peer]\n{KEYED}curve_allowed_keys = ['any']\ncurve_allowed_keys_file = '/l'", ["leave out one"]),
        ("[http]\nbind = '9440'", ["http.bind", "host:port"]),
        ("[mover]\nlibrary = 'ucx'", ["mover.library", "auto, nixl or rixl"]),
        ("[mover]\nenvironment = {UCX_TLS = 1}", ["mover.environment"]),
        ("[peer]\npp_aware = 'no'", ["peer.pp_aware", "true or false"]),
        ("[mover\n", ["not TOML"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, toml: str, names: list[str]) -> None:
    file = tmp_path / "k.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as refused:
        load_config(file, {}, {})
    assert refused.value.code is Code.CONFIG_INVALID
    assert str(refused.value).startswith("cannot ")
    for name in names:
        assert name in str(refused.value)


@pytest.mark.parametrize(
    ("key", "text", "wanted"),
    [
        ("transfer.lease_s", "soon", ""),
        ("worker.mode", "rw", ""),
        ("mover.pool_size", "1.5", ""),
        ("peer.pp_aware", "perhaps", ""),
        # Who gives a list as the file would have it learns how text is written.
        ("worker.allowed_uids", "[0, 1000]", "separated by commas"),
        ("peer.curve_allowed_keys", '["any"]', "separated by commas, or any"),
        ("peer.allowed_addresses", "node-7", "separated by commas"),
        ("mover.environment", "UCX_TLS=rc,cuda_copy", "NAME=text,NAME=text"),
    ],
)
def test_a_bad_variable_or_flag_is_refused_by_name(key: str, text: str, wanted: str) -> None:
    variable = SETTINGS[key].variable
    with pytest.raises(ConfigError, match=f"{variable}: give .*{wanted}"):
        load_config(None, {variable: text}, {})
    with pytest.raises(ConfigError, match=f"flag {flag_name(key)}: give .*{wanted}"):
        load_config(None, {}, {key: text})


def test_a_name_that_no_setting_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="KVXFERD_TRANSFER_LEASE "):
        load_config(None, {"KVXFERD_TRANSFER_LEASE": "3"}, {})
    with pytest.raises(ConfigError, match=r"transfer\.lease\b"):
        load_config(None, {}, {"transfer.lease": "3"})


def test_what_kubernetes_adds_for_a_service_is_no_setting() -> None:
    # A pod beside a Service named kvxferd, or kvxferd-metrics, gets these without asking.
    environ = {
        "KVXFERD_PORT": "tcp://10.0.0.1:9440",
        "KVXFERD_PORT_9440_TCP": "tcp://10.0.0.1:9440",
        "KVXFERD_PORT_9440_TCP_ADDR": "10.0.0.1",
        "KVXFERD_SERVICE_HOST": "10.0.0.1",
        "KVXFERD_SERVICE_PORT_METRICS": "9440",
        "KVXFERD_METRICS_SERVICE_PORT": "9440",
        "KVXFERD_METRICS_PORT_9440_TCP_PROTO": "tcp",
        "KVXFERD_CONFIG": "/etc/kvxferd/kvxferd.toml",
    }
    assert load_config(None, environ, {}) == Config()


# --- every problem of a file at once


def problems_of(file: Path) -> list[str]:
    try:
        load_config(file, {}, {})
    except ConfigError as refused:
        lines = refused.message.splitlines()
        return [line.strip() for line in lines[len(lines) > 1 :]]
    return []


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", []),
        ("[transfer]\nlease = 3\nlease_s = 'x'\nmax_hold_s = 3", ["transfer.lease", "transfer.lease_s"]),
        ("[no]\na = 1\n[log]\nlevel = 'loud'\n[nor]\n", ["no of", "log.level", "nor of"]),
        ("[log]\nlevel = 'info'\nlevel = 'info'\n", ["not TOML"]),
        # Contradictions are looked for once every value is valid by itself.
        ("[log]\nlevel = 'info'\n[transfer]\nlease_s = 900", ["transfer.max_hold_s"]),
    ],
)
def test_each_bad_key_is_found(tmp_path: Path, text: str, want: list[str]) -> None:
    file = tmp_path / "k.toml"
    file.write_text(text)
    found = problems_of(file)
    assert len(found) == len(want)
    assert all(part in problem for part, problem in zip(want, found, strict=True))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml", {}, {})
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(tmp_path / "bytes.toml", {}, {})


def test_a_secret_in_place_of_its_path_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text(
        "[peer]\ncurve_secret_key_file = 'c0ffee'\n[mover]\nenvironment = {PASSWORD = ['hunter2']}"
    )
    key_file, movers = problems_of(file)
    assert "peer.curve_secret_key_file" in key_file
    assert "mover.environment" in movers
    assert "c0ffee" not in key_file
    assert "hunter2" not in movers
