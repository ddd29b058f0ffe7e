"""The manifests of Kubernetes: valid, and in agreement with what the daemon reads, serves and needs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import NamedTuple

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
    Manifest,
    containers_of,
    environment_of,
    mounts_of,
    of_kind,
    pod_of,
    render,
)
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
OVERLAYS = ("daemonset", "sidecar", "gpu", "keys")
# The oldest with native sidecars, and the newest that there are schemas of.
VERSIONS = ("1.29", kubernetes_validate.latest_version())
# Resource types of others: there is no schema of them here.
FOREIGN_KINDS = {"PodMonitor", "PrometheusRule"}
PUBLIC_KEY = "354db91c7d2e479b1fdfbd2fd4b3f0240a466b380126cc90cf82185728fcd524"


class Form(NamedTuple):
    """Rendered manifests: the one workload among them, its pod, and its daemon's container."""

    manifests: list[Manifest]
    workload: Manifest
    pod: Manifest
    daemon: Manifest

    @classmethod
    def of(cls, manifests: list[Manifest]) -> Form:
        (workload,) = of_kind(manifests, "DaemonSet", "Deployment")
        return cls(manifests, workload, pod_of(workload), containers_of(pod_of(workload))["kvxferd"])

    def config(self, directory: Path, node: str = "node-a") -> Config:
        """What the daemon's own reader makes of the container's environment and the mounted file."""
        (config_map,) = of_kind(self.manifests, "ConfigMap")
        path = directory / "kvxferd.toml"
        path.write_text(config_map["data"]["kvxferd.toml"])
        environment = environment_of(self.daemon, {**FIELDS, "spec.nodeName": node})
        assert CONFIG_PATH_VARIABLE not in environment
        return load_config(path, environment, {})


def rendered(overlay: str) -> Form:
    return Form.of(render(KUBERNETES / "overlays" / overlay))


@pytest.fixture(params=OVERLAYS)
def form(request: pytest.FixtureRequest) -> Form:
    """Each overlay."""
    return rendered(request.param)


@pytest.fixture
def config(form: Form, tmp_path: Path) -> Config:
    return form.config(tmp_path)


def compose(tmp_path: Path, resource: str, component: str) -> Form:
    """Render an operator's own folder beside the overlays: one of them with a component."""
    tree = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, tree)
    own = tree / "cluster"
    own.mkdir()
    lines = (f"resources: [../overlays/{resource}]", f"components: [../components/{component}]")
    (own / "kustomization.yaml").write_text("\n".join(lines))
    return Form.of(render(own))


# Kubernetes' own rules.


@pytest.mark.process
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid(overlay: str, version: str) -> None:
    for manifest in render(KUBERNETES / "overlays" / overlay):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_no_pod_has_a_token_or_a_privilege_it_does_not_need(form: Form) -> None:
    pod = form.pod
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


def test_the_settings_are_loaded_and_the_ports_agree(config: Config, form: Form) -> None:
    ports = {port["name"]: port["containerPort"] for port in form.daemon["ports"]}
    address = FIELDS["status.hostIP" if form.workload["kind"] == "DaemonSet" else "status.podIP"]
    assert split_endpoint(config.peer.bind) == (address, ports["peer"])
    assert config.http.bind == f"{address}:{ports['http']}"
    annotations = form.workload["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(ports["http"])}


def test_the_arguments_are_the_command_line_s_and_name_the_mounted_file(form: Form) -> None:
    verb, *arguments = form.daemon["args"]
    assert verb in VERBS
    context = click.Context(command_line)
    command = command_line.get_command(context, verb)
    assert command is not None
    values = command.make_context(verb, list(arguments), parent=context).params.values()
    (path,) = [value for value in values if str(value).endswith("kvxferd.toml")]
    assert mounts_of(form.daemon)[str(PurePosixPath(str(path)).parent)]["readOnly"] is True


def test_probes_ask_for_routes_that_are_there(form: Form) -> None:
    paths = {route.path for route in ROUTES if route.method == "GET"}
    probes = {kind: form.daemon[kind] for kind in form.daemon if kind.endswith("Probe")}
    assert {"readinessProbe", "livenessProbe"} <= set(probes)
    for kind, probe in probes.items():
        assert probe["httpGet"]["path"] == ("/healthz" if kind == "livenessProbe" else "/readyz")
        assert probe["httpGet"]["path"] in paths
        assert probe["httpGet"]["port"] in {port["name"] for port in form.daemon["ports"]}


def test_a_stop_may_take_as_long_as_a_drain(config: Config, form: Form) -> None:
    assert form.pod["terminationGracePeriodSeconds"] > config.drain.limit_s + STOP_S


def test_what_the_daemon_writes_is_a_volume_that_others_do_not_write_in(config: Config, form: Form) -> None:
    mounts = mounts_of(form.daemon)
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    for path in (config.node.run_dir, config.worker.socket, config.control.socket, "/dev/shm/x"):
        assert any(PurePosixPath(path).is_relative_to(place) for place in writable), path
    # NIXL looks into the home directory, and the root file system cannot be written.
    assert environment_of(form.daemon)["HOME"] in writable
    # An emptyDir has mode 0777: the daemon would refuse it.
    empty = {volume["name"] for volume in form.pod["volumes"] if "emptyDir" in volume}
    assert mounts.get(config.node.run_dir, {}).get("name") not in empty


def test_an_engine_sees_the_socket_and_neither_locks_nor_the_control_socket(
    config: Config, form: Form
) -> None:
    socket = PurePosixPath(config.worker.socket)
    is_daemon_set = form.workload["kind"] == "DaemonSet"
    pod = pod_of(yaml.safe_load((KUBERNETES / "engine.yaml").read_text())) if is_daemon_set else form.pod
    engine = containers_of(pod)["engine"]
    ((place, mount),) = mounts_of(engine).items()
    assert place == str(socket.parent)
    assert mount["readOnly"] is True
    if is_daemon_set:
        run_directory = mounts_of(form.daemon)[config.node.run_dir]["name"]
        below = socket.relative_to(config.node.run_dir).parent
        assert host_path(pod, mount["name"]) == host_path(form.pod, run_directory) / below
    else:
        assert mounts_of(form.daemon)[place]["name"] == mount["name"]
    # The locks are in run_dir/private, the control socket in run_dir.
    for path in (config.control.socket, f"{config.node.run_dir}/private"):
        assert not PurePosixPath(path).is_relative_to(socket.parent)
    # By the socket's mode: they are of one user.
    assert user_of(engine, pod) == user_of(form.daemon, form.pod)


def host_path(pod: Manifest, volume: str) -> PurePosixPath:
    (found,) = [one for one in pod["volumes"] if one["name"] == volume]
    return PurePosixPath(found["hostPath"]["path"])


def user_of(container: Manifest, pod: Manifest) -> int:
    """Return the user of a container: its own, or else the pod's."""
    own, of_pod = (one.get("securityContext", {}).get("runAsUser") for one in (container, pod))
    found = of_pod if own is None else own
    assert found is not None
    return int(found)


def test_the_sidecar_is_a_native_one_and_ready_before_the_engine() -> None:
    pod = rendered("sidecar").pod
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert pod["shareProcessNamespace"] is True
    assert [container["name"] for container in pod["containers"]] == ["engine"]


# GPUs and images.


@pytest.mark.process
@pytest.mark.parametrize("name", ["gpu", "keys", "sidecar"])
def test_gpus_are_visible_and_none_is_requested(name: str, tmp_path: Path) -> None:
    form = compose(tmp_path, "sidecar", "gpu") if name == "sidecar" else rendered(name)
    assert form.pod["runtimeClassName"] == "nvidia"
    environment = environment_of(form.daemon)
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    for wants in form.daemon["resources"].values():
        assert set(wants) <= {"cpu", "memory"}
    form.config(tmp_path)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_have_one_name_and_this_version(overlay: str) -> None:
    containers = containers_of(rendered(overlay).pod)
    images = {container["image"] for name, container in containers.items() if name != "engine"}
    assert images == {f"kvxferd:{kvxferd.__version__}{'-gpu' if overlay in ('gpu', 'keys') else ''}"}


# Keys.


@pytest.fixture
def keys_form() -> Form:
    return rendered("keys")


def test_each_node_has_a_key_of_its_own_name(keys_form: Form, tmp_path: Path) -> None:
    volumes = {volume["name"]: volume for volume in keys_form.pod["volumes"]}
    for node in ("node-a", "node-b"):
        path = PurePosixPath(keys_form.config(tmp_path, node).peer.curve_secret_key_file)
        assert path.name == f"{node}.key"
        mount = mounts_of(keys_form.daemon)[str(path.parent)]
        assert mount["readOnly"] is True
        assert volumes[mount["name"]]["hostPath"]["type"] == "DirectoryOrCreate"
    # subPath would make a directory of a file that is missing.
    assert "subPath" not in str(keys_form.pod)
    assert of_kind(keys_form.manifests, "Secret") == []
    assert not any("secret" in volume for volume in keys_form.pod["volumes"])


def test_the_daemon_watches_a_file_of_keys_that_is_mounted_beside_its_configuration(
    keys_form: Form, tmp_path: Path
) -> None:
    config = keys_form.config(tmp_path).peer
    assert config.curve_allowed_keys == ()
    path = PurePosixPath(config.curve_allowed_keys_file)
    mount = mounts_of(keys_form.daemon)[str(path.parent)]
    assert "subPath" not in mount  # which the kubelet never renews
    assert mount["name"] in {v["name"] for v in keys_form.pod["volumes"] if "configMap" in v}
    (config_map,) = of_kind(keys_form.manifests, "ConfigMap")
    listed = tmp_path / "allowed-keys"
    for more, keys in (("", set()), (f"{PUBLIC_KEY}\n", {PUBLIC_KEY})):
        listed.write_text(config_map["data"][path.name] + more)
        assert read_allowed_keys(listed) == keys


@pytest.mark.process
def test_the_key_container_makes_a_key_once_and_prints_its_public_half(
    keys_form: Form, tmp_path: Path
) -> None:
    container = containers_of(keys_form.pod)["key"]
    place = next(iter(mounts_of(container)))
    assert mounts_of(container)[place]["name"] == mounts_of(keys_form.daemon)[place]["name"]
    (script,) = container["args"]
    program = tmp_path / "bin" / "kvxferd"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom kvxferd.cli import main\nmain()\n")
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    environment = environment_of(container) | {"PATH": path, "PYTHONPATH": str(ROOT)}
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
    form = compose(tmp_path, overlay, "pod-monitor")
    (monitor,) = of_kind(form.manifests, "PodMonitor")
    # It may lie in another namespace than the pods.
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    labels = form.workload["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in form.daemon["ports"]}
    assert endpoint["path"] in {route.path for route in ROUTES}
    # The alerts select by this job.
    assert labels[monitor["spec"]["jobLabel"]] == "kvxferd"


# The page.


@pytest.mark.process
def test_the_page_s_own_folder_is_rendered_and_its_settings_are_loaded(tmp_path: Path) -> None:
    """In a copy of what the page's commands use, with the folder that it tells operators to make."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    own = tmp_path / "deploy" / "kubernetes" / "cluster"
    own.mkdir()
    (kustomization,) = blocks_of(PAGE, "yaml")
    (settings,) = blocks_of(PAGE, "toml")
    (own / "kustomization.yaml").write_text(kustomization)
    (own / "kvxferd.toml").write_text(settings)
    form = Form.of(render(own))
    for manifest in form.manifests:
        if manifest["kind"] not in FOREIGN_KINDS:
            kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    config = form.config(tmp_path)
    assert config.peer.allowed_addresses == ("10.0.0.0/16",)
    assert config.mover.environment == {"UCX_TCP_PORT_RANGE": "20000-20999"}
    images = {container["image"] for container in containers_of(form.pod).values()}
    assert images == {f"registry.example/kvxferd:{kvxferd.__version__}-gpu"}
