"""The extras that an engine's environment takes: what the connector imports, beside what vLLM pins."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[4]

# Read from the metadata of vllm 0.33.0, and of the torch 2.14.0 (CUDA 13) that it pins. vLLM bounds neither
# msgspec nor numpy nor pyzmq from above, and names no nixl. torch 2.10 of CUDA 12 pins cuda-bindings 12.9.4.
OF_VLLM_0_33 = {"msgspec": "", "numpy": "", "pyzmq": ">=25.0.0", "torch": "==2.14.0"}


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    read: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return read


def requirements(project: dict[str, object], extra: str) -> dict[str, Requirement]:
    """Return what an extra brings with the base, by name; extras of this project are followed."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    base = project["dependencies"]
    assert isinstance(base, list)
    found: dict[str, Requirement] = {}
    left = [*base, *extras[extra]]
    while left:
        requirement = Requirement(left.pop())
        if requirement.name == "kvxferd":
            left += [line for name in requirement.extras for line in extras[name]]
        else:
            found[requirement.name] = requirement
    return found


def test_a_cache_in_host_memory_asks_for_nothing_that_vllm_lacks(project: dict[str, object]) -> None:
    assert set(requirements(project, "engine")) <= set(OF_VLLM_0_33)


@pytest.mark.parametrize("extra", ["engine-gpu", "engine-gpu-cu12", "engine-gpu-cu13"])
def test_a_cache_in_gpu_memory_brings_what_both_placements_import(
    project: dict[str, object], extra: str
) -> None:
    assert {"msgspec", "numpy", "cuda-bindings", "nixl"} == set(requirements(project, extra))
