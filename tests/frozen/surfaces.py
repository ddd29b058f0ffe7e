"""Every surface by its name, and the function that returns it as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frozen import (
    codes,
    command_line,
    http_routes,
    imports,
    log_lines,
    metrics,
    settings,
    variables,
    wire,
)

SURFACES: dict[str, Callable[[], Any]] = {
    "wire": wire.surface,
    "http": http_routes.surface,
    "command_line": command_line.surface,
    "metrics": metrics.surface,
    "log_lines": log_lines.surface,
    "codes": codes.surface,
    "settings": settings.surface,
    "variables": variables.surface,
    "imports": imports.surface,
}
