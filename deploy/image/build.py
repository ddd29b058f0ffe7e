"""Build the image with podman, where there may be no registry.

python3 deploy/image/build.py [--variant cpu|cuda12|cuda13] [--base IMAGE] [--tag NAME]

Without --base it makes one by debootstrap, as root, and keeps it outside the tree for the next time. pip asks
where pip on this host would: its settings of where packages come from are mounted for the commands that
install, and are in no layer of the image. Needs podman 4 or newer, and the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
VARIANTS = {
    "cpu": ("--target", "cpu"),
    "cuda12": ("--target", "gpu", "--build-arg", "CUDA=12"),
    "cuda13": ("--target", "gpu", "--build-arg", "CUDA=13"),
}
# Of pip's settings only those that say where packages come from. A host's constraints are not the image's.
SOURCES = (
    "cert",
    "client-cert",
    "default-timeout",
    "extra-index-url",
    "find-links",
    "index-url",
    "no-index",
    "proxy",
    "retries",
    "timeout",
    "trusted-host",
)
_SETTING = re.compile(r"^(?P<scope>[^.=]+)\.(?P<name>[^=]+)=(?P<value>['\"].*)$")

SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "ca-certificates,python3,python3-venv"
# Of the host, or of the day when it was made; or documentation.
LEFT_OUT = (
    "etc/hostname",
    "etc/machine-id",
    "etc/resolv.conf",
    "usr/share/doc/",
    "usr/share/locale/",
    "usr/share/man/",
    "var/cache/",
    "var/lib/apt/lists/",
    "var/log/",
)


class Mount(NamedTuple):
    """A directory or file of the host, mounted read-only at its own path."""

    path: Path

    def flag(self) -> str:
        """Return it as podman's --volume takes it."""
        return f"--volume={self.path}:{self.path}:ro"


def package_sources(config_list: Iterable[str]) -> dict[str, str]:
    """Return the settings of `pip config list` that say where packages come from.

    A variable of the environment goes before a command's own setting, and that before a global one.
    """
    order = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in config_list:
        if not (match := _SETTING.match(line)) or match["scope"] not in order:
            continue
        name, rank = match["name"].replace("_", "-"), order[match["scope"]]
        if name in SOURCES and rank >= found.get(name, (-1, ""))[0]:
            found[name] = (rank, str(ast.literal_eval(match["value"])))  # pip prints it by repr
    return {name: " ".join(value.split()) for name, (_, value) in sorted(found.items())}


def pip_conf(sources: Mapping[str, str]) -> str:
    """Return them as a pip.conf."""
    lines = [f"{name} = {value}" for name, value in sources.items() if value]
    return "\n".join(["[global]", *lines, ""])


def mounts_of(sources: Mapping[str, str]) -> list[Mount]:
    """Return what of this host the settings name, as far as it exists, each once.

    An index in a directory is mounted with the directory around it: its pages' links lead to there.
    """
    paths = [Path(sources[name]) for name in ("cert", "client-cert") if sources.get(name)]
    paths += [path for text in sources.get("find-links", "").split() if (path := _local_path(text))]
    for name in ("index-url", "extra-index-url"):
        found = [path for text in sources.get(name, "").split() if (path := _local_path(text))]
        paths += [path.parent for path in found]
    existing = {Path(os.path.abspath(path)) for path in paths if path.exists()}
    if Path("/") in existing:
        raise SystemExit(
            "build.py: cannot mount /: pip's settings name an index just below it; move it into a folder"
        )
    return [Mount(path) for path in sorted(existing) if not existing & set(path.parents)]


def _local_path(text: str) -> Path | None:
    if text.startswith("file:"):
        return Path(unquote(urlsplit(text).path))
    return Path(text) if text.startswith("/") else None


def build_command(variant: str, base: str, tag: str, secret: Path, mounts: Sequence[Mount]) -> list[str]:
    """Return podman's command line. `chroot` needs no runtime, so it works within a container too."""
    return [
        *("podman", "build", "--isolation", "chroot", "--layers", *VARIANTS[variant], "--tag", tag),
        *("--build-arg", f"BASE_IMAGE={base}", "--secret", f"id=pip.conf,src={secret}"),
        *(mount.flag() for mount in mounts),
        str(ROOT),
    ]


def host_sources() -> dict[str, str]:
    """Return where this host's pip takes packages from."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    return package_sources(listed.stdout.splitlines())


def cache_folder() -> Path:
    """Return where a base is kept: never in the tree."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvxferd"


def debootstrap_base() -> str:
    """Make and import a base of Debian with Python, as far as it is not there yet, and return its name."""
    name = f"localhost/kvxferd-base:{SUITE}"
    if subprocess.run(["podman", "image", "exists", name], check=False).returncode == 0:
        return name
    archive = cache_folder() / f"base-{SUITE}.tar"
    if not archive.exists():
        if os.geteuid() != 0 or not shutil.which("debootstrap"):
            raise SystemExit(
                "build.py: cannot make a base: that needs root and debootstrap; name one by --base, "
                "such as docker.io/library/python:3.12-slim"
            )
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kvxferd-base-") as made:
            mirror = os.environ.get("DEBIAN_MIRROR", MIRROR)
            run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, made, mirror])
            (Path(made) / "etc/apt/sources.list").write_text(f"deb {MIRROR} {SUITE} main\n")
            _pack(Path(made), archive)
    run(["podman", "import", "--quiet", str(archive), name])
    return name


def _pack(folder: Path, archive: Path) -> None:
    begun = archive.with_suffix(".begun")
    with tarfile.open(begun, "w") as tar:
        tar.add(folder, arcname=".", filter=_kept)
    begun.replace(archive)


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    # The folders themselves stay: packages that are installed later expect them.
    return None if member.name.removeprefix("./").startswith(LEFT_OUT) else member


def run(command: Sequence[str]) -> None:
    """Run it, with its output here. Its failure is this program's."""
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(f"build.py: {command[0]} {command[1]} ended with {code}")


def main() -> None:
    """Build one image and print its name and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="cpu")
    parser.add_argument("--base", default="", help="the BASE_IMAGE; without it one is made by debootstrap")
    parser.add_argument("--tag", default="", help="localhost/kvxferd:VARIANT without it")
    flags = parser.parse_args()
    if not shutil.which("podman"):
        raise SystemExit("build.py: cannot build: there is no podman; apt-get install podman")
    tag = flags.tag or f"localhost/kvxferd:{flags.variant}"
    base = flags.base or debootstrap_base()
    sources = host_sources()
    with tempfile.NamedTemporaryFile("w", prefix="kvxferd-pip-", suffix=".conf") as conf:  # mode 0600
        conf.write(pip_conf(sources))
        conf.flush()
        run(build_command(flags.variant, base, tag, Path(conf.name), mounts_of(sources)))
    run(
        ["podman", "images", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}", "--filter", f"reference={tag}"]
    )


if __name__ == "__main__":
    main()
