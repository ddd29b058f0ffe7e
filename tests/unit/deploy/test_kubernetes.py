"""The manifests of Kubernetes: valid, and in agreement with what the daemon reads, serves and needs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

import kvxferd
from kvxferd.cli.root import VERBS
from kvxferd.cli.root import root as command_line
from kvxferd.config import CONFIG_PATH_VARIABLE, Config, load_config
from kvxferd.config.types import split_endpoint
from kvxferd.control.allowed_keys_file import read_allowed_keys
from kvxferd.control.curve_keys import read_key
from kvxferd.control.http_routes import ROUTES
from kvxferd.daemon import STOP_S
from tests.support.documented_commands import blocks_of
from tests.support.manifests import (
    FIELDS,
    KUBERNETES,
    ROOT,
    Manifest,
    containers_of,
    environment_of,
    mounts_of,
    of_kind,
    pod_of,
    render,
)

PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
OVERLAYS = ("daemonset", "sidecar", "gpu", "keys")
# The oldest with native sidecars, and the newest that there are schemas of.
VERSIONS = ("1.29", kubernetes_validate.latest_version())
# Resource types of others: there is no schema of them here.
FOREIGN_KINDS = {"PodMonitor", "PrometheusRule"}
MIB = 1 << 20
PUBLIC_KEY = "354db91c7d2e479b1fdfbd2fd4b3f0240a466b380126cc90cf82185728fcd524"


@pytest.fixture(params=OVERLAYS)
def form(request: pytest.FixtureRequest) -> list[Manifest]:
    """Each overlay as rendered."""
    return render(KUBERNETES / "overlays" / request.param)


@pytest.fixture
def workload(form: list[Manifest]) -> Manifest:
    return parts_of(form)[0]


@pytest.fixture
def pod(form: list[Manifest]) -> Manifest:
    return parts_of(form)[1]


@pytest.fixture
def daemon(form: list[Manifest]) -> Manifest:
    return parts_of(form)[2]


@pytest.fixture
def config(form: list[Manifest], daemon: Manifest, tmp_path: Path) -> Config:
    """What the daemon's own reader makes of the container's environment and the mounted file."""
    return read_config(form, daemon, tmp_path)


def parts_of(form: list[Manifest]) -> tuple[Manifest, Manifest, Manifest]:
    """Return the one workload, its pod and its daemon's container."""
    (workload,) = of_kind(form, "DaemonSet", "Deployment")
    pod = pod_of(workload)
    return workload, pod, containers_of(pod)["kvxferd"]


def config_text(form: list[Manifest]) -> str:
    (config_map,) = of_kind(form, "ConfigMap")
    text: str = config_map["data"]["kvxferd.toml"]
    return text


def read_config(form: list[Manifest], daemon: Manifest, tmp_path: Path, node: str = "node-a") -> Config:
    path = tmp_path / "kvxferd.toml"
    path.write_text(config_text(form))
    environment = environment_of(daemon, {**FIELDS, "spec.nodeName": node})
    assert CONFIG_PATH_VARIABLE not in environment
    return load_config(path, environment, {})


def parsed(verb: str, arguments: list[str]) -> dict[str, Any]:
    """Return the values that the command line takes from the arguments, without running the verb."""
    assert verb in VERBS
    context = click.Context(command_line)
    command = command_line.get_command(context, verb)
    assert command is not None
    return command.make_context(verb, list(arguments), parent=context).params


def compose(tmp_path: Path, kustomization: str, files: dict[str, str] | None = None) -> list[Manifest]:
    """Render an operator's own folder beside the overlays."""
    tree = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, tree)
    own = tree / "cluster"
    own.mkdir()
    (own / "kustomization.yaml").write_text(kustomization)
    for name, text in (files or {}).items():
        (own / name).write_text(text)
    return render(own)


def with_components(resource: str, *components: str) -> str:
    lines = [f"resources: [../overlays/{resource}]", "components:"]
    return "\n".join([*lines, *(f"  - ../components/{name}" for name in components), ""])


# Kubernetes' own rules.


@pytest.mark.process
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid(overlay: str, version: str) -> None:
    for manifest in render(KUBERNETES / "overlays" / overlay):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_no_pod_has_a_token_or_a_privilege_it_does_not_need(pod: Manifest) -> None:
    assert pod["automountServiceAccountToken"] is False
    for name, container in containers_of(pod).items():
        if name == "engine":
            continue
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "privileged" not in security
        # A capability is added to root alone; to others it would only look as if it were.
        runs_as_root = security.get("runAsUser", pod.get("securityContext", {}).get("runAsUser")) == 0
        assert security["capabilities"].get("add", []) == (
            ["IPC_LOCK"] if runs_as_root and name == "kvxferd" else []
        )


# What the daemon makes of them.


def test_the_settings_are_loaded_and_the_ports_agree(
    config: Config, daemon: Manifest, workload: Manifest
) -> None:
    ports = {port["name"]: port["containerPort"] for port in daemon["ports"]}
    address = FIELDS["status.hostIP" if workload["kind"] == "DaemonSet" else "status.podIP"]
    assert split_endpoint(config.peer.bind) == (address, ports["peer"])
    assert config.http.bind == f"{address}:{ports['http']}"
    annotations = workload["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(ports["http"])}


def test_the_arguments_are_the_command_line_s_and_name_the_mounted_file(daemon: Manifest) -> None:
    verb, *arguments = daemon["args"]
    values = parsed(verb, arguments)
    (path,) = [value for value in values.values() if str(value).endswith("kvxferd.toml")]
    assert mounts_of(daemon)[str(PurePosixPath(str(path)).parent)]["readOnly"] is True


def test_probes_ask_for_routes_that_are_there(daemon: Manifest) -> None:
    paths = {route.path for route in ROUTES if route.method == "GET"}
    probes = {kind: daemon[kind] for kind in daemon if kind.endswith("Probe")}
    assert {"readinessProbe", "livenessProbe"} <= set(probes)
    for kind, probe in probes.items():
        assert probe["httpGet"]["path"] == ("/healthz" if kind == "livenessProbe" else "/readyz")
        assert probe["httpGet"]["path"] in paths
        assert probe["httpGet"]["port"] in {port["name"] for port in daemon["ports"]}


def test_a_stop_may_take_as_long_as_a_drain(config: Config, pod: Manifest) -> None:
    assert pod["terminationGracePeriodSeconds"] > config.drain.limit_s + STOP_S


def test_what_the_daemon_writes_is_a_volume(config: Config, daemon: Manifest) -> None:
    writable = {path for path, mount in mounts_of(daemon).items() if not mount.get("readOnly")}
    for path in (config.node.run_dir, config.worker.socket, config.control.socket, "/dev/shm/x"):
        assert any(PurePosixPath(path).is_relative_to(place) for place in writable), path
    # NIXL looks into the home directory, and the root file system cannot be written.
    assert environment_of(daemon)["HOME"] in writable


def test_the_run_directory_is_not_one_that_others_write_in(
    config: Config, pod: Manifest, daemon: Manifest
) -> None:
    # An emptyDir has mode 0777: the daemon would refuse it.
    empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    assert mounts_of(daemon).get(config.node.run_dir, {}).get("name") not in empty


def engine_pod() -> Manifest:
    manifest: Manifest = yaml.safe_load((KUBERNETES / "engine.yaml").read_text())
    return manifest


def test_an_engine_sees_the_socket_and_neither_locks_nor_the_control_socket(
    config: Config, workload: Manifest, pod: Manifest, daemon: Manifest
) -> None:
    socket = PurePosixPath(config.worker.socket)
    engines = pod_of(engine_pod()) if workload["kind"] == "DaemonSet" else pod
    engine = containers_of(engines)["engine"]
    ((place, mount),) = mounts_of(engine).items()
    assert place == str(socket.parent)
    assert mount["readOnly"] is True
    host = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in engines["volumes"]}
    if workload["kind"] == "DaemonSet":
        run = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
        daemon_path = run[mounts_of(daemon)[config.node.run_dir]["name"]]
        assert host[mount["name"]] == str(
            PurePosixPath(daemon_path) / socket.relative_to(config.node.run_dir).parent
        )
    else:
        assert mounts_of(daemon)[place]["name"] == mount["name"]
    # The locks are in run_dir/private, the control socket in run_dir.
    assert not PurePosixPath(config.control.socket).is_relative_to(socket.parent)
    assert not (PurePosixPath(config.node.run_dir) / "private").is_relative_to(socket.parent)
    # By the socket's mode: they are of one user.
    own = engine.get("securityContext", engines.get("securityContext", {}))["runAsUser"]
    assert own == daemon["securityContext"].get("runAsUser", pod.get("securityContext", {}).get("runAsUser"))


def test_the_sidecar_is_a_native_one_and_ready_before_the_engine(pod: Manifest, workload: Manifest) -> None:
    if workload["kind"] == "DaemonSet":
        assert "restartPolicy" not in containers_of(pod)["kvxferd"]
        return
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert pod["shareProcessNamespace"] is True
    assert [container["name"] for container in pod["containers"]] == ["engine"]


# Memory.


# GPUs.


def gpu_forms(tmp_path: Path) -> Iterator[tuple[str, list[Manifest]]]:
    yield "gpu", render(KUBERNETES / "overlays" / "gpu")
    yield "keys", render(KUBERNETES / "overlays" / "keys")
    yield "sidecar", compose(tmp_path / "sidecar", with_components("sidecar", "gpu"))


@pytest.mark.process
def test_gpus_are_visible_and_none_is_requested(tmp_path: Path) -> None:
    for name, form in gpu_forms(tmp_path):
        _workload, pod, daemon = parts_of(form)
        assert pod["runtimeClassName"] == "nvidia", name
        environment = environment_of(daemon)
        assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
        for wants in daemon["resources"].values():
            assert set(wants) <= {"cpu", "memory"}
        read_config(form, daemon, tmp_path)


# Images.


def test_images_have_one_name_and_this_version() -> None:
    version = kvxferd.__version__
    for overlay in OVERLAYS:
        (workload,) = of_kind(render(KUBERNETES / "overlays" / overlay), "DaemonSet", "Deployment")
        containers = containers_of(pod_of(workload))
        images = {container["image"] for name, container in containers.items() if name != "engine"}
        assert images == {f"kvxferd:{version}{'-gpu' if overlay in ('gpu', 'keys') else ''}"}


# Keys.


@pytest.fixture
def keys_form() -> list[Manifest]:
    return render(KUBERNETES / "overlays" / "keys")


def test_each_node_has_a_key_of_its_own_name(keys_form: list[Manifest], tmp_path: Path) -> None:
    _workload, pod, daemon = parts_of(keys_form)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    names = set()
    for node in ("node-a", "node-b"):
        path = PurePosixPath(read_config(keys_form, daemon, tmp_path, node).peer.curve_secret_key_file)
        assert path.name == f"{node}.key"
        names.add(path)
        mount = mounts_of(daemon)[str(path.parent)]
        assert mount["readOnly"] is True
        assert volumes[mount["name"]]["hostPath"]["type"] == "DirectoryOrCreate"
        # subPath would make a directory of a file that is missing.
        assert "subPath" not in str(pod)
    assert len(names) == 2
    assert of_kind(keys_form, "Secret") == []
    assert not any("secret" in volume for volume in pod["volumes"])


def test_the_daemon_watches_a_file_of_keys_that_is_mounted_beside_its_configuration(
    keys_form: list[Manifest], tmp_path: Path
) -> None:
    workload, _pod, daemon = parts_of(keys_form)
    config = read_config(keys_form, daemon, tmp_path).peer
    assert config.curve_allowed_keys == ()
    path = PurePosixPath(config.curve_allowed_keys_file)
    mount = mounts_of(daemon)[str(path.parent)]
    assert "subPath" not in mount  # which the kubelet never renews
    assert mount["name"] in {v["name"] for v in pod_of(workload)["volumes"] if "configMap" in v}
    (config_map,) = of_kind(keys_form, "ConfigMap")
    listed = tmp_path / "allowed-keys"
    listed.write_text(config_map["data"][path.name])
    assert read_allowed_keys(listed) == frozenset()
    listed.write_text(f"{config_map['data'][path.name]}{PUBLIC_KEY}\n")
    assert read_allowed_keys(listed) == {PUBLIC_KEY}


@pytest.mark.process
def test_the_key_container_makes_a_key_once_and_prints_its_public_half(
    keys_form: list[Manifest], tmp_path: Path
) -> None:
    (workload,) = of_kind(keys_form, "DaemonSet")
    pod = pod_of(workload)
    container, daemon = containers_of(pod)["key"], containers_of(pod)["kvxferd"]
    place = next(iter(mounts_of(container)))
    assert mounts_of(container)[place]["name"] == mounts_of(daemon)[place]["name"]
    (script,) = container["args"]
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "kvxferd"
    program.write_text(f"#!{sys.executable}\nfrom kvxferd.cli import main\nmain()\n")
    program.chmod(0o755)
    environment = {**environment_of(container), "PATH": f"{programs}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [*container["command"], script.replace(place, str(tmp_path))]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    key = tmp_path / "node-a.key"
    assert outputs == [f"{read_key(key).public}\n"] * 2
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.write_text("no key\n")
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert key.read_text() == "no key\n"


# Metrics.


@pytest.mark.process
@pytest.mark.parametrize("overlay", ["keys", "sidecar"])
def test_a_pod_monitor_finds_the_pods_and_their_port(overlay: str, tmp_path: Path) -> None:
    form = compose(tmp_path, with_components(overlay, "pod-monitor"))
    (monitor,) = of_kind(form, "PodMonitor")
    (workload,) = of_kind(form, "DaemonSet", "Deployment")
    # It may lie in another namespace than the pods.
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    daemon = containers_of(pod_of(workload))["kvxferd"]
    assert endpoint["port"] in {port["name"] for port in daemon["ports"]}
    assert endpoint["path"] in {route.path for route in ROUTES}
    # The alerts select by this job.
    assert labels[monitor["spec"]["jobLabel"]] == "kvxferd"


# The page.


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the page's commands use, with the folder that it tells operators to make."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "deploy", root / "deploy")
    own = root / "deploy" / "kubernetes" / "cluster"
    own.mkdir()
    (kustomization,) = blocks_of(PAGE, "yaml")
    (settings,) = blocks_of(PAGE, "toml")
    (own / "kustomization.yaml").write_text(kustomization)
    (own / "kvxferd.toml").write_text(settings)
    return root


@pytest.mark.process
def test_the_page_s_own_folder_is_rendered_and_its_settings_are_loaded(
    checkout: Path, tmp_path: Path
) -> None:
    form = render(checkout / "deploy" / "kubernetes" / "cluster")
    for manifest in form:
        if manifest["kind"] not in FOREIGN_KINDS:
            kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    (workload,) = of_kind(form, "DaemonSet")
    containers = containers_of(pod_of(workload))
    config = read_config(form, containers["kvxferd"], tmp_path)
    assert config.peer.allowed_addresses == ("10.0.0.0/16",)
    assert config.mover.environment == {"UCX_TCP_PORT_RANGE": "20000-20999"}
    assert {c["image"] for c in containers.values()} == {
        f"registry.example/kvxferd:{kvxferd.__version__}-gpu"
    }
