"""`kvxferd demo`: its options and its exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvxferd.layout.presets import LAYOUT_NAMES
from kvxferd.tooling.exit_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_WRONG_BYTES

if TYPE_CHECKING:
    from kvxferd.demo.results import DemoResults
    from kvxferd.demo.shape import DemoShape


_count = click.IntRange(min=1)


def _engine_options(role: str, tp: int, pp: int, block_tokens: int, layout: str) -> Callable[[Any], Any]:
    def with_options(verb: Any) -> Any:
        for option in (
            click.option(
                f"--{role}-layout", type=click.Choice(LAYOUT_NAMES), default=layout, show_default=True
            ),
            click.option(f"--{role}-block-tokens", type=_count, default=block_tokens, show_default=True),
            click.option(f"--{role}-pp", type=_count, default=pp, show_default=True, help="Pipeline stages."),
            click.option(
                f"--{role}-tp", type=_count, default=tp, show_default=True, help="Ranks of a stage."
            ),
        ):
            verb = option(verb)
        return verb

    return with_options


@click.command()
@_engine_options("prefill", tp=4, pp=2, block_tokens=16, layout="HND")
@_engine_options("decode", tp=2, pp=1, block_tokens=32, layout="NHD")
@click.option("--layers", type=_count, default=16, show_default=True)
@click.option("--heads", type=_count, default=8, show_default=True, help="KV heads of the model.")
@click.option("--head-dim", type=_count, default=128, show_default=True)
@click.option("--requests", type=_count, default=16, show_default=True)
@click.option("--tokens", type=_count, default=500, show_default=True, help="Tokens of a request.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
# For tests of the demo: corrupt one byte of the first request, to show that the check finds it.
@click.option("--damage", type=click.Choice(["", "item", "spill"]), default="", hidden=True)
@click.pass_context
def demo(ctx: click.Context, /, as_json: bool, damage: str, **options: Any) -> None:
    """Move KV cache between two daemons on this machine and check every byte.

    Starts two daemons and two engines of real processes with different layouts, moves requests
    through NIXL, and exits with 1 if a byte is wrong. Everything that it started ends with it.
    Unless an engine is described by flags, it does the same between two equal engines, to compare.
    """
    # Imported here, so that the other verbs do not load numpy and asyncio.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvxferd.demo.report import render_report
    from kvxferd.demo.runner import run_demo
    from kvxferd.tooling.output import console, print_fitted, print_json

    shape = _demo_shape(options)
    shape.check()
    shapes = [shape] if _has_engine_flags(ctx) else [shape, shape.equal]
    found: list[DemoResults] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("starting daemons and workers", total=len(shapes) * shape.requests)

            def on_request(done: int) -> None:
                progress.update(
                    task, completed=len(found) * shape.requests + done, description="moving requests"
                )
                if done == 0 and not progress.console.is_terminal:  # where no progress bar is drawn
                    click.echo("kvxferd: moving requests", err=True)

            for one in shapes:
                found.append(run_demo(one, on_request, "" if found else damage))
                if not found[-1].is_ok:
                    break
    except KeyboardInterrupt:
        click.echo("kvxferd: the demo was interrupted; everything it started is gone", err=True)
        ctx.exit(EXIT_INTERRUPTED)
    results, equal = found[0], found[1] if len(found) > 1 else None
    if as_json:
        print_json(results.as_json() | ({} if equal is None else {"equal": equal.as_json()}))
    else:
        print_fitted(console(), render_report(results, equal))
    ctx.exit(EXIT_OK if all(one.is_ok for one in found) else EXIT_WRONG_BYTES)


def _has_engine_flags(ctx: click.Context) -> bool:
    """Whether the shape of an engine was given, and not left to the defaults."""
    return any(
        ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
        for name in ctx.params
        if name.startswith(("prefill_", "decode_"))
    )


def _demo_shape(options: dict[str, Any]) -> DemoShape:
    from kvxferd.demo.shape import DemoShape, EngineShape

    def engine(role: str) -> EngineShape:
        return EngineShape(
            tp=options[f"{role}_tp"],
            pp=options[f"{role}_pp"],
            block_tokens=options[f"{role}_block_tokens"],
            layout=options[f"{role}_layout"],
        )

    return DemoShape(
        prefill=engine("prefill"),
        decode=engine("decode"),
        heads=options["heads"],
        head_dim=options["head_dim"],
        layers=options["layers"],
        requests=options["requests"],
        tokens=options["tokens"],
    )
