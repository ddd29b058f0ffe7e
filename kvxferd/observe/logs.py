"""The log: structured lines on standard error, for people on a terminal and JSON elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO, assert_never

import structlog

from kvxferd.config import LogConfig
from kvxferd.core.snapshot import (
    HandshakeRecord,
    LanesRecord,
    PlacementRecord,
    PullRecord,
    Record,
    ReleaseRecord,
    TopologyRecord,
)

# Said in the log, by `kvxferd status` and by `/readyz`.
SLOW_ON_NODE = (
    "data between two processes of this node goes over TCP, though this kernel could copy it directly: the "
    "other daemon, or a worker's own mover, is of another user or PID namespace; run one daemon per node, or "
    "both as one user and, in containers, with hostPID"
)

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure_logs(config: LogConfig, stream: TextIO | None = None) -> None:
    """Set up this process's log, that of its libraries included: lines on `stream`, or standard error."""
    stream = sys.stderr if stream is None else stream
    json = config.format == "json" or (config.format == "auto" and not stream.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    )
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.level]),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    # asyncio and aiohttp log by the standard library: same form, warnings and worse only.
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(_LEVELS[config.level], logging.WARNING), force=True)


def log_record(record: Record) -> None:
    """Write the one line of something that ended."""
    log: Any = structlog.get_logger()
    match record:
        case PullRecord():
            write = log.info if record.outcome == "delivered" else log.warning
            write("pull", **_pull_fields(record))
        case HandshakeRecord():
            write = log.info if record.outcome == "ok" else log.warning
            write(
                "handshake",
                engine=record.engine_id,
                endpoint=record.endpoint,
                outcome=record.outcome,
                ranks=record.num_ranks,
                elapsed_s=round(record.elapsed_s, 6),
                **_unless_empty("message", record.message),
            )
        case ReleaseRecord():
            log.info(
                "release",
                transfer=record.transfer_id,
                engine=record.engine_id,
                why=record.why.value,
                held_s=round(record.held_s, 6),
            )
        case TopologyRecord():
            log.info(
                "topology", sink=record.sink, rank=str(record.rank), source=record.source, text=record.text
            )
        case PlacementRecord():
            write = log.info if record.proved else log.warning
            write("placement", **_placement_fields(record))
        case LanesRecord():
            write = log.warning if record.slow else log.info
            write(
                "connected",
                engine=record.engine_id,
                rank=str(record.rank),
                reach=record.reach,
                lanes=record.lanes,
                **_unless_empty("message", SLOW_ON_NODE if record.slow else ""),
            )
        case _:
            assert_never(record)


def _placement_fields(record: PlacementRecord) -> dict[str, object]:
    return {
        "engine": record.engine_id,
        "rank": str(record.rank),
        "placement": record.placement,
        "proved": record.proved,
        **_unless_empty("why", record.why),
        **_unless_empty("lanes", record.lanes),
        "gigabytes_per_s": record.gigabytes_per_s,
    }


def _pull_fields(record: PullRecord) -> dict[str, object]:
    return {
        "transfer": record.transfer_id,
        "source": record.source,
        "sink": record.sink,
        "rank": str(record.rank),
        "outcome": record.outcome,
        **_unless_empty("code", "" if record.code is None else record.code.value),
        **_unless_empty("message", record.message),
        "bytes": record.bytes,
        "runs": record.runs,
        "total_s": round(record.total_s, 6),
        **{f"{phase}_s": round(elapsed_s, 6) for phase, elapsed_s in record.phases_s.items()},
    }


def _unless_empty(key: str, text: str) -> dict[str, str]:
    return {key: text} if text else {}
