"""`kvxferd explain`: its arguments and its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvxferd.cli.options import json_option, with_control_client
from kvxferd.errors import ConfigError
from kvxferd.ids import Rank
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.exit_codes import EXIT_OK, EXIT_REFUSED
from kvxferd.tooling.output import console, print_json

if TYPE_CHECKING:
    from kvxferd.explain.analysis import DecodeRankReads, Explanation

# Listed here so that --help does not load numpy; a test compares them with the module.
LINK_NAMES = ("cma", "tcp", "100g", "400g")


@click.command()
@click.argument("prefill")
@click.argument("decode")
@click.option("--rank", "rank", metavar="PP,TP", help="Also show the byte ranges of this decode rank.")
@click.option(
    "--svg", "svg", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Draw a picture."
)
@click.option(
    "--link",
    type=click.Choice(LINK_NAMES),
    default=LINK_NAMES[0],
    show_default=True,
    help="Predict times for this link: copies within the node, TCP, or a network card of 100 or 400 Gbit/s.",
)
@json_option
@with_control_client
@click.pass_context
def explain(
    ctx: click.Context,
    daemon: ControlClient,
    prefill: str,
    decode: str,
    rank: str | None,
    svg: Path | None,
    link: str,
    as_json: bool,
) -> None:
    """Show what DECODE would read from PREFILL: which ranks, layers, heads, bytes and runs, or why it cannot.

    Also in which way each rank is read, how long that is predicted to take, and what layout would be faster.

    Each is PRESET[,key=value...] (keys tp, pp, block_tokens, layout, num_blocks and more), a .json or
    .toml file, or @ENGINE_ID for an engine that is registered in the daemon. No GPU is needed, and a
    daemon only for @ENGINE_ID. Exits with 1 if DECODE cannot read from PREFILL.
    """
    # Imported here, so that the other verbs do not load numpy.
    from kvxferd.explain.advice import with_advice
    from kvxferd.explain.analysis import explain_pair
    from kvxferd.explain.byte_ranges import byte_ranges
    from kvxferd.explain.engine_spec_parser import parse_engine
    from kvxferd.explain.json_report import explanation_json
    from kvxferd.explain.svg_report import draw_svg
    from kvxferd.explain.text_report import print_byte_ranges, print_explanation

    asked = _parse_rank(rank)
    source, sink = (parse_engine(text, lambda: daemon) for text in (prefill, decode))
    explanation = with_advice(explain_pair(source, sink, link))
    chosen = _reads_of_rank(explanation, asked)
    ranges = None if chosen is None else byte_ranges(chosen)
    if svg is not None:
        try:
            svg.write_text(draw_svg(explanation), "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {str(svg)!r}: {error.strerror}") from error
    if as_json:
        print_json(explanation_json(explanation, ranges))
    else:
        out = console()
        print_explanation(out, explanation)
        if chosen is not None and ranges is not None:
            print_byte_ranges(out, chosen, ranges)
    ctx.exit(EXIT_REFUSED if explanation.refused else EXIT_OK)


def _parse_rank(text: str | None) -> Rank | None:
    if text is None:
        return None
    try:
        pp_rank, tp_rank = map(int, text.split(","))
    except ValueError:
        raise ConfigError(f"cannot use --rank {text}: write pp_rank,tp_rank, as in 0,3") from None
    return Rank(pp_rank, tp_rank)


def _reads_of_rank(explanation: Explanation, rank: Rank | None) -> DecodeRankReads | None:
    """Return the reads of the requested rank; None if the engines are refused."""
    if rank is None:
        return None
    if rank not in explanation.decode.ranks:
        spec = explanation.decode.spec
        raise ConfigError(
            f"cannot use --rank {rank.pp_rank},{rank.tp_rank}: decode's ranks are 0 to {spec.pp_size - 1},"
            f"0 to {spec.tp_size - 1}"
        )
    return next((reads for reads in explanation.ranks if reads.rank == rank), None)
