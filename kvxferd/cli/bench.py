"""`kvxferd bench`: its options and its exit code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from kvxferd.layout.presets import LAYOUT_NAMES
from kvxferd.tooling.exit_codes import EXIT_ERROR, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from kvxferd.bench.runner import BenchOptions


# Listed here so that --help needs neither numpy nor a model; a test compares them with the modules.
SHAPE_NAMES = ("llama-3-70b", "qwen3-8b", "deepseek-v3", "mamba2-hybrid")
PATTERN_NAMES = ("contiguous", "fragmented", "scattered")
TRANSPORT_NAMES = ("cma", "tcp", "any")
MEASURE_NAMES = ("latency", "throughput", "handover", "calls", "behind", "idle", "layouts", "first")

MIN_SIZE, MAX_SIZE = 64 << 10, 2 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:iB)?", re.IGNORECASE)


class Size(click.ParamType[int]):
    """A number of bytes: ``64K``, ``4M``, ``2GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes, or fail with the reason."""
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no size: write 64K, 4M or 2G", param, ctx)
        size = int(match[1]) * _UNITS[match[2].upper()]
        if not MIN_SIZE <= size <= MAX_SIZE:
            self.fail(f"{value!r} is out of range: 64K to 2G", param, ctx)
        return size


@click.command()
@click.option("--quick", is_flag=True, help="Measure only what every figure takes: in about six minutes.")
@click.option(
    "--measure",
    "measures",
    type=click.Choice(MEASURE_NAMES),
    multiple=True,
    help="Only these measures. Default: all.",
)
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(SHAPE_NAMES),
    multiple=True,
    help="Of the throughput measure. Default: all.",
)
@click.option(
    "--blocks",
    "patterns",
    type=click.Choice(PATTERN_NAMES),
    multiple=True,
    help="Of the throughput measure. Default: all.",
)
@click.option(
    "--size",
    "sizes",
    type=Size(),
    multiple=True,
    help="Sizes of the throughput measure, 64K to 2G. Default: eight between them.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(1, 64),
    multiple=True,
    help="Pulls in flight of the throughput measure. Default: 1, 8, 64.",
)
@click.option(
    "--layout",
    "layouts",
    type=click.Choice([name for name in LAYOUT_NAMES if name != "LHBNC"]),  # its blocks are not in one piece
    multiple=True,
    help="Of throughput and first pulls, on both sides; for several also TP 2 from TP 4. Default: HND.",
)
@click.option("--rounds", type=click.IntRange(1, 99), default=None, help="Interleaved rounds. Default: 7.")
@click.option(
    "--transport",
    "transports",
    type=click.Choice(TRANSPORT_NAMES),
    multiple=True,
    help="The transport of movers and baselines. Default: cma, and tcp unless --quick.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def bench(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Measure the cost of a daemon against NIXL inside the engine, side by side.

    Starts two daemons, their workers, and plain processes that move the same bytes by NIXL alone,
    in turn. Everything that it started ends with it.
    """
    bench_options = _bench_options(options)
    # Imported here, so that the other verbs do not load numpy.
    from kvxferd.bench.runner import run_bench
    from kvxferd.tooling.output import print_json

    try:
        result = run_bench(bench_options, lambda what: click.echo(f"kvxferd: {what}", err=True))
    except KeyboardInterrupt:
        click.echo("kvxferd: the bench was interrupted; everything it started is gone", err=True)
        ctx.exit(EXIT_INTERRUPTED)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(result))
    else:
        from kvxferd.bench.report import print_report

        print_report(result)
    if result.error:
        click.echo(f"kvxferd: {result.error}", err=True)
        ctx.exit(EXIT_ERROR)


def _bench_options(options: dict[str, Any]) -> BenchOptions:
    from kvxferd.bench.cases import BlockPattern
    from kvxferd.bench.runner import BenchOptions
    from kvxferd.bench.workload import ALL_IN_FLIGHT, ALL_SIZES, full_workload, quick_workload

    measures = frozenset(options["measures"] or MEASURE_NAMES)
    if options["quick"]:
        if any(options[name] for name in ("shapes", "patterns", "sizes", "in_flight", "layouts", "rounds")):
            raise click.UsageError("--quick has its own shapes, sizes, layouts and rounds: leave theirs out")
        transports = options["transports"] or ("cma",)
        return BenchOptions(quick_workload(), transports, is_quick=True, measures=measures)
    workload = full_workload(
        options["shapes"] or SHAPE_NAMES,
        options["sizes"] or ALL_SIZES,
        tuple(map(BlockPattern, options["patterns"] or PATTERN_NAMES)),
        options["in_flight"] or ALL_IN_FLIGHT,
        options["rounds"] or 0,
        options["layouts"] or ("HND",),
    )
    if not workload.throughput:
        raise click.UsageError("no size fits in memory as often as --in-flight says: at most 2G in all")
    transports = options["transports"] or ("cma", "tcp")
    return BenchOptions(workload, transports, is_quick=False, measures=measures)
