"""An engine's settings, from what an operator gave it, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from kvxferd.errors import Code, EngineError

T = TypeVar("T", bound=msgspec.Struct)

Seconds = Annotated[float, msgspec.Meta(gt=0, le=365 * 24 * 3600.0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


def read_settings(kind: type[T], given: Mapping[str, Any], where: str, *, strict: bool = True) -> T:
    """Return the settings; `strict`: no text stands for a number.

    Raises EngineError(config-invalid) that names `where` they came from, and the wrong one.
    """
    try:
        return msgspec.convert(dict(given), kind, strict=strict)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise EngineError(f"cannot read {where}: {error}; known are {known}", Code.CONFIG_INVALID) from error
