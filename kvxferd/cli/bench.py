"""`kvxferd bench`: its options and its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvxferd.tooling.exit_codes import EXIT_ERROR, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from kvxferd.bench.runner import BenchOptions


# Listed here so that --help needs neither numpy nor a model; a test compares them with the modules.
SHAPE_NAMES = ("llama-3-70b", "qwen3-8b", "deepseek-v3", "mamba2-hybrid")
TRANSPORT_NAMES = ("cma", "tcp", "any")
MEASURE_NAMES = ("latency", "throughput", "handover", "calls", "behind", "idle", "layouts", "first")

SIZES = {"64K": 64 << 10, "256K": 256 << 10, "1M": 1 << 20, "4M": 4 << 20, "16M": 16 << 20,
         "64M": 64 << 20, "256M": 256 << 20, "2G": 2 << 30}  # fmt: skip


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
    "--size",
    "sizes",
    type=click.Choice(tuple(SIZES)),
    multiple=True,
    help="Of the throughput measure. Default: all.",
)
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
    from kvxferd.bench.runner import BenchOptions
    from kvxferd.bench.workload import full_workload, quick_workload

    measures, shapes, sizes = (options[name] for name in ("measures", "shapes", "sizes"))
    if options["quick"] and (shapes or sizes):
        raise click.UsageError("--quick has its own shapes and sizes: leave theirs out")
    if options["quick"]:
        workload = quick_workload()
    else:
        workload = full_workload(shapes or SHAPE_NAMES, tuple(SIZES[name] for name in sizes or SIZES))
    transports = options["transports"] or (("cma",) if options["quick"] else ("cma", "tcp"))
    return BenchOptions(workload, transports, options["quick"], frozenset(measures or MEASURE_NAMES))
