"""The explanation as SVG: decode ranks against prefill ranks, coloured by bytes."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.explain.analysis import DecodeRankReads, Explanation, RankRead
from kvxferd.explain.engine_spec_parser import EngineDescription
from kvxferd.explain.formatting import (
    format_engine,
    format_heads,
    format_layers,
    format_numbers,
    format_ranks,
    format_units,
)
from kvxferd.explain.read_estimate import REQUEST_TOKENS
from kvxferd.explain.svg import (
    BLUE,
    FAINT,
    INK,
    ORANGE,
    RULE,
    Canvas,
    Scale,
    longest_fitting,
    shade,
    text_width,
)
from kvxferd.ids import Rank
from kvxferd.layout import GroupKind
from kvxferd.tooling.output import format_bytes

MARGIN = 28.0
SCALES: dict[GroupKind, Scale] = {GroupKind.ATTENTION: BLUE, GroupKind.STATE: ORANGE}
STAGE_BAND = 24.0  # height of a stage's band above the matrix
STAGE_SIDE_BAND = 118.0  # width of a stage's band beside the matrix
MAX_BAR = 150.0  # length of the longest bar
NOT_READ = "#f4f5f7"
AT_MOST_MEAN, ABOVE_MEAN = "#aab3bf", "#6b7686"  # bars of prefill ranks, against the mean
# (ranks along one side, a cell's width if they are columns, its height if they are rows)
_CELLS = ((4, 128.0, 58.0), (8, 104.0, 50.0), (16, 66.0, 42.0), (32, 32.0, 24.0), (64, 17.0, 16.0))
_MIN_CELL = (9.0, 12.0)  # for more ranks; the picture grows


def draw_svg(explanation: Explanation) -> str:
    """Return an SVG document of a pair that is possible."""
    canvas = Canvas()
    _ReadMatrix(canvas, explanation).draw(_heading(canvas, explanation))
    return canvas.to_svg(f"{explanation.decode.label} reads {explanation.prefill.label}", MARGIN)


def _heading(canvas: Canvas, explanation: Explanation) -> float:
    """Draw the title and the two engines; return the y below them."""
    y = MARGIN + 16
    reads = sum(len(rank.reads) for rank in explanation.ranks)
    runs = sum(rank.num_runs for rank in explanation.ranks)
    canvas.text(MARGIN, y, "Which prefill ranks each decode rank reads", size=22, bold=True)
    y += 24
    sentence = (
        f"A request of {REQUEST_TOKENS:,} tokens moves {format_bytes(explanation.num_bytes)} in "
        f"{reads:,} read{'s' * (reads != 1)}: "
        f"{runs:,} runs of {format_bytes(explanation.num_bytes / max(1, runs))} on average"
    )
    canvas.text(MARGIN, y, sentence, size=14)
    for role, engine in (("prefill", explanation.prefill), ("decode", explanation.decode)):
        y += 20
        canvas.text(MARGIN, y, role, size=12, bold=True)
        canvas.text(MARGIN + 60, y, f"{engine.label}  ({format_engine(engine)})", size=12, fill=FAINT)
    return y + 28


class _ReadMatrix:
    """The matrix with everything around it; positions are computed once."""

    def __init__(self, canvas: Canvas, explanation: Explanation) -> None:
        self.canvas = canvas
        self.explanation = explanation
        kinds = {read.kind for rank in explanation.ranks for read in rank.reads}
        self.kinds = [kind for kind in GroupKind if kind in kinds] or [GroupKind.ATTENTION]
        self.columns = sorted(explanation.prefill.ranks)
        self.rows = list(explanation.ranks)
        self.width, self.height = _cell_size(len(self.columns), 0), _cell_size(len(self.rows), 1)
        if len(self.kinds) > 1 and len(self.rows) <= 16:
            self.height = max(self.height, 64.0)  # two lines for each kind
        self.most = {kind: max(self._sizes(kind), default=1) or 1 for kind in self.kinds}
        self.left = MARGIN + STAGE_SIDE_BAND + 44
        self.top = 0.0

    @property
    def right(self) -> float:
        return self.left + self.width * len(self.columns)

    @property
    def bottom(self) -> float:
        return self.top + self.height * len(self.rows)

    def draw(self, y: float) -> None:
        self.top = y + 20 + STAGE_BAND + 28
        self.canvas.text(
            self.left, y + 10, "prefill ranks, by pipeline stage and tp rank", size=12, bold=True
        )
        self.canvas.text(MARGIN, self.top - 8, "decode ranks", size=12, bold=True)
        self._column_heads(y + 20)
        self._row_heads()
        for index, row in enumerate(self.rows):
            self._row(index, row)
        self._stage_lines()
        self._row_bars()
        y = self._column_bars(self.bottom + 14)
        self._legend(y + 18)

    def _sizes(self, kind: GroupKind) -> list[int]:
        return [read.num_bytes for rank in self.rows for read in rank.reads if read.kind is kind]

    # --- around the matrix

    def _column_heads(self, y: float) -> None:
        for stage in _stages(self.explanation.prefill):
            x, width = self.left + stage.first * self.width, stage.size * self.width
            self.canvas.rect(x + 1, y, width - 2, STAGE_BAND - 4, "#e8ebf0")
            label = longest_fitting(stage.labels(), width - 6, 11)
            self.canvas.text(x + width / 2, y + 14, label, size=11, anchor="middle")
        size = min(11.0, self.width * 0.55)
        for index, rank in enumerate(self.columns):
            x = self.left + (index + 0.5) * self.width
            name = f"tp {rank.tp_rank}" if self.width >= 40 else str(rank.tp_rank)
            self.canvas.text(x, y + STAGE_BAND + 10, name, size=size, anchor="middle", fill=FAINT)

    def _row_heads(self) -> None:
        for stage in _stages(self.explanation.decode):
            y, height = self.top + stage.first * self.height, stage.size * self.height
            self.canvas.rect(MARGIN, y + 1, STAGE_SIDE_BAND - 4, height - 2, "#e8ebf0")
            self._draw_stage_label(stage, y + height / 2)
        size = max(9.0, min(11.0, self.height * 0.62))
        x = MARGIN + STAGE_SIDE_BAND
        for index, row in enumerate(self.rows):
            y = self.top + (index + 0.5) * self.height
            name = f"tp {row.rank.tp_rank}" if self.height >= 16 else str(row.rank.tp_rank)
            self.canvas.text(x + 28, y + size * 0.35, name, size=size, anchor="end", fill=FAINT)

    def _draw_stage_label(self, stage: _Stage, y: float) -> None:
        label = longest_fitting(stage.labels(), STAGE_SIDE_BAND - 8, 11)
        if stage.size * self.height >= 10:
            self.canvas.text(MARGIN + STAGE_SIDE_BAND / 2 - 2, y + 4, label, size=11, anchor="middle")

    # --- the matrix

    def _row(self, index: int, row: DecodeRankReads) -> None:
        y = self.top + index * self.height
        part = (self.height - 2) / len(self.kinds)
        for column, source in enumerate(self.columns):
            x = self.left + column * self.width
            title = f"decode {row.rank} does not read prefill {source}"
            self.canvas.rect(x + 1, y + 1, self.width - 2, self.height - 2, NOT_READ, title=title)
            for number, kind in enumerate(self.kinds):
                for read in row.reads:
                    if (read.source, read.kind) == (source, kind):
                        self._cell(row.rank, read, x + 1, y + 1 + number * part, part)

    def _cell(self, rank: Rank, read: RankRead, x: float, y: float, height: float) -> None:
        """Draw one read, with its layers and heads as far as there is room."""
        fraction = 0.12 + 0.88 * read.num_bytes / self.most[read.kind]
        title = (
            f"decode {rank} reads prefill {read.source} for {read.kind.value}: layers "
            f"{format_numbers(read.layers)}, "
            f"{format_units(read.units)}, {format_bytes(read.num_bytes)} in {read.num_runs:,} runs of "
            f"{format_bytes(read.mean_run_bytes)} per {REQUEST_TOKENS:,} tokens"
        )
        self.canvas.rect(x, y, self.width - 2, height, shade(SCALES[read.kind], fraction), title=title)
        ink = "#ffffff" if fraction > 0.5 else INK
        room = self.width - 6
        layers, heads = format_layers(read.layers), format_heads(read.units)
        if (
            longest_fitting(
                (f"{layers}, {heads}", counted := f"{len(read.layers)} layers, {heads}"), room, 10
            )
            == counted
        ):
            layers = f"{len(read.layers)} layers"
        lines = [format_bytes(read.num_bytes), f"{layers}, {heads}"]
        if text_width(lines[1], 10) > room:
            lines = [lines[0], layers, heads]
        lines = [line for line in lines if text_width(line, 10) <= room][: int((height - 4) // 12)]
        together = f"{format_bytes(read.num_bytes)}: {layers}, {heads}"
        if len(lines) == 1 and text_width(together, 10) <= room:
            lines = [together]
        middle = y + height / 2 - (len(lines) - 1) * 6.5 + 3.5
        for number, line in enumerate(lines):
            self.canvas.text(
                x + self.width / 2 - 1,
                middle + number * 13,
                line,
                size=10,
                fill=ink,
                anchor="middle",
                bold=number == 0,
            )

    def _stage_lines(self) -> None:
        """Draw the lines between stages."""
        for stage in _stages(self.explanation.prefill)[1:]:
            x = self.left + stage.first * self.width
            self.canvas.line(x, self.top - 4, x, self.bottom + 4, INK, 1.5)
        for stage in _stages(self.explanation.decode)[1:]:
            y = self.top + stage.first * self.height
            self.canvas.line(self.left - 4, y, self.right + 4, y, INK, 1.5)

    # --- beside and below it

    def _row_bars(self) -> None:
        """Draw bars of the bytes that each decode rank reads."""
        most = max((row.num_bytes for row in self.rows), default=0) or 1
        x = self.right + 18
        self.canvas.text(x, self.top - 8, "each decode rank reads", size=12, bold=True)
        size = max(9.0, min(11.0, self.height * 0.62))
        for index, row in enumerate(self.rows):
            y = self.top + index * self.height
            inset = self.height * 0.22
            at = x
            for kind in self.kinds:
                width = MAX_BAR * sum(r.num_bytes for r in row.reads if r.kind is kind) / most
                self.canvas.rect(at, y + inset, width, self.height - 2 * inset, shade(SCALES[kind], 0.6))
                at += width
            ranks = len({read.source for read in row.reads})
            sentence = (
                f"{format_bytes(row.num_bytes)} from {ranks} rank{'s' * (ranks != 1)}, {row.num_runs:,} runs"
            )
            self.canvas.text(x + MAX_BAR + 8, y + self.height / 2 + size * 0.35, sentence, size=size)

    def _column_bars(self, y: float) -> float:
        """Draw bars of the bytes that each prefill rank sends, and their mean; return the y below them."""
        loads = self.explanation.loads()
        most = max(load.num_bytes for load in loads) or 1
        mean = sum(load.num_bytes for load in loads) / len(loads)
        height = 44.0
        self.canvas.text(self.left - 8, y + 22, "each prefill rank gives", size=12, bold=True, anchor="end")
        sentence = f"at most {format_bytes(most)}" + (f", mean {format_bytes(mean)}" if mean < most else "")
        self.canvas.text(self.left - 8, y + 37, sentence, size=11, fill=FAINT, anchor="end")
        for index, load in enumerate(loads):
            x = self.left + index * self.width
            length = height * load.num_bytes / most
            title = f"prefill {load.rank} gives {format_bytes(load.num_bytes)}"
            if load.readers:
                readers = format_ranks(load.readers)
                title += f", {load.num_bytes / mean:.0%} of the mean: {load.num_runs:,} runs to {readers}"
            fill = ABOVE_MEAN if load.num_bytes > mean else AT_MOST_MEAN
            self.canvas.rect(x + 2, y, self.width - 4, max(length, 0.5), fill, title=title)
            label = longest_fitting(
                (format_bytes(load.num_bytes) if load.readers else "idle",), self.width, 10
            )
            self.canvas.text(x + self.width / 2, y + height + 13, label, size=10, fill=FAINT, anchor="middle")
        self.canvas.line(self.left, y, self.right, y, RULE)
        if mean < most:
            at = y + height * mean / most
            self.canvas.line(self.left, at, self.right, at, INK)
        return y + height + 18

    def _legend(self, y: float) -> None:
        """Draw the legend of the colours, and what the letters mean."""
        self.canvas.rect(MARGIN, y, 18, 14, NOT_READ, edge=RULE)
        self.canvas.text(MARGIN + 24, y + 11, "not read", size=12)
        x = MARGIN + 100
        for kind in self.kinds:
            for step in range(10):
                self.canvas.rect(x + step * 14, y, 14.5, 14, shade(SCALES[kind], 0.12 + 0.88 * step / 9))
            sentence = f"{kind.value}: up to {format_bytes(self.most[kind])} a read"
            self.canvas.text(x + 148, y + 11, sentence, size=12)
            x += 164 + text_width(sentence, 12)
        y += 30
        sentence = "Bytes are those of one request of 1,000 tokens. L: layers, h: KV heads, s: state heads."
        if len(self.kinds) > 1:
            sentence += " The upper part of a cell is attention, the lower part state (once per request)."
        self.canvas.text(MARGIN, y + 4, sentence, fill=FAINT)


class _Stage(NamedTuple):
    """One pipeline stage: neighbouring ranks along one side of the matrix."""

    pp_rank: int
    first: int  # index of its first rank on that side
    size: int
    layers: range

    def labels(self) -> tuple[str, ...]:
        """Return its labels, the longest first."""
        if not self.layers:
            return (f"stage {self.pp_rank}: no layers", f"pp{self.pp_rank}: none", str(self.pp_rank))
        return (
            f"stage {self.pp_rank}: layers {format_numbers(self.layers)}",
            f"pp{self.pp_rank}: {format_layers(self.layers)}",
            format_layers(self.layers),
            f"pp{self.pp_rank}",
            str(self.pp_rank),
        )


def _stages(engine: EngineDescription) -> list[_Stage]:
    """Return an engine's stages in the order of its ranks."""
    ranks = sorted(engine.ranks)
    found = []
    for pp_rank in sorted({rank.pp_rank for rank in ranks}):
        own = [index for index, rank in enumerate(ranks) if rank.pp_rank == pp_rank]
        layout = engine.ranks[ranks[own[0]]][1]
        found.append(_Stage(pp_rank, own[0], len(own), range(layout.start_layer, layout.end_layer)))
    return found


def _cell_size(ranks: int, side: int) -> float:
    """Return a cell's width (side 0, ranks along the columns) or height (side 1, along the rows)."""
    return next((sizes[side] for limit, *sizes in _CELLS if ranks <= limit), _MIN_CELL[side])
