"""In place of sgl-kernel, of which PyPI has no build for CPUs: every name is there, and raises if called.

SGLang imports names of it where a plain attention model on a CPU takes its own PyTorch code. So a test passes
over this only where none of it was needed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, NoReturn

import torch


def _missing(name: str) -> Any:
    def raising(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in: it is to be called nowhere")

    raising.__name__ = name
    return raising


class _Constants:
    """Named and not used here, as scalar_types.uint4b8."""

    def __getattr__(self, name: str) -> str:
        return name


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Constants() if name == "scalar_types" else _missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> _Module:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


# SGLang asks for it at start, to bind its threads; a tensor-parallel engine without it binds none.
_LIBRARY = torch.library.Library("sgl_kernel", "DEF")
_LIBRARY.define("init_cpu_threads_env(str ids) -> str")
_LIBRARY.impl("init_cpu_threads_env", lambda ids: ids, "CompositeExplicitAutograd")
