"""The extras that an engine's environment takes: what the connector imports, beside what vLLM pins."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[4]

# Read from the metadata of vllm 0.33.0, and of the torch 2.14.0 (CUDA 13) that it pins. vLLM bounds neither
# msgspec nor numpy nor pyzmq from above, and names no nixl. torch 2.10 of CUDA 12 pins cuda-bindings 12.9.4.
OF_VLLM_0_33 = {"msgspec": "", "numpy": "", "pyzmq": ">=25.0.0", "torch": "==2.14.0"}
CUDA_BINDINGS_OF_TORCH = {"cu12": "~=12.9.4", "cu13": "<14,>=13.0.3"}
# A version of each that is published, and satisfies what vLLM and torch ask.
PUBLISHED = {"msgspec": "0.22.0", "numpy": "2.3.5", "nixl": "1.5.1"}
CUDA_BINDINGS = {"cu12": "12.9.10", "cu13": "13.4.4"}


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


@pytest.mark.parametrize(
    ("extra", "cuda"),
    [
        ("engine-gpu", "cu12"),
        ("engine-gpu", "cu13"),
        ("engine-gpu-cu12", "cu12"),
        ("engine-gpu-cu13", "cu13"),
    ],
)
def test_they_can_be_installed_beside_vllm(project: dict[str, object], extra: str, cuda: str) -> None:
    bindings = CUDA_BINDINGS[cuda]
    assert bindings in SpecifierSet(CUDA_BINDINGS_OF_TORCH[cuda])
    asked = requirements(project, extra)
    assert bindings in asked["cuda-bindings"].specifier
    for name, version in PUBLISHED.items():
        assert version in asked[name].specifier & SpecifierSet(OF_VLLM_0_33.get(name, ""))


@pytest.mark.parametrize(("extra", "other"), [("engine-gpu-cu12", "cu13"), ("engine-gpu-cu13", "cu12")])
def test_an_extra_of_one_cuda_refuses_the_bindings_of_the_other(
    project: dict[str, object], extra: str, other: str
) -> None:
    assert CUDA_BINDINGS[other] not in requirements(project, extra)["cuda-bindings"].specifier
