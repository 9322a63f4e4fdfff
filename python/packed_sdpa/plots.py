"""PNG plots of the demo and of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packed_sdpa.errors import import_extra
from packed_sdpa.packing import PackedRows, Piece

STOCK_COLOR = "#c2543d"
PACKED_COLOR = "#2b6cb0"
_DOCUMENT_COLORS = (
    "#2b6cb0", "#e0903f", "#4a9d6e", "#c2543d", "#7f6bb3", "#c9a83c", "#3fa3b5", "#d17ba0", "#6b8e3d", "#8a6a52",
    "#6fa0d8", "#f0b97a",
)  # fmt: skip
_STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e2e2e2",
    "legend.frameon": False,
    "hatch.color": "#c4c4c4",
    "hatch.linewidth": 0.6,
}


@contextmanager
def _figure(path: Path, width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """The axes of a figure (one, or an array) that needs no display and is written to ``path`` at the end."""
    matplotlib = import_extra("matplotlib", "demo")
    figures = import_extra("matplotlib.figure", "demo")
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(figsize=(width, height), layout="constrained", dpi=130)
        yield figure.subplots(rows, columns, **options)
        figure.savefig(path)


def plot_losses(path: Path, stock: Sequence[float], packed: Sequence[float]) -> Path:
    """Both loss curves, and below them how far they are apart."""
    steps = range(1, len(stock) + 1)
    with _figure(path, 8, 5.2, rows=2, sharex=True, gridspec_kw={"height_ratios": [3, 1]}) as (curves, gaps):
        curves.plot(steps, stock, color=STOCK_COLOR, linewidth=6, alpha=0.35, label="Transformers, dense mask")
        curves.plot(steps, packed, color=PACKED_COLOR, linewidth=1.8, label="packed_sdpa")
        apart = [abs(left - right) for left, right in zip(stock, packed, strict=True)]
        curves.set_title(f"Training loss of both ways: at most {max(apart):.1e} apart")
        curves.set_ylabel("loss per token")
        curves.legend()
        gaps.bar(steps, apart, color="#777777", width=0.6)
        gaps.set_ylabel("difference")
        gaps.set_xlabel("step")
        gaps.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        gaps.xaxis.get_major_locator().set_params(integer=True)
    return path


def plot_step_bars(path: Path, seconds: tuple[float, float], memory_mb: tuple[float, float]) -> Path:
    """Bars of step time and peak memory, Transformers and packed_sdpa (in this order in both pairs)."""
    with _figure(path, 8, 4.4, columns=2) as axes:
        panels = (
            (axes[0], seconds, f"Step time: {seconds[0] / seconds[1]:.1f}x as fast", "seconds a step", "{:.2f} s"),
            (axes[1], memory_mb, f"Peak memory: {memory_mb[1] - memory_mb[0]:+,.0f} MiB", "MiB", "{:,.0f} MiB"),
        )
        for axis, values, title, unit, label in panels:
            bars = axis.bar(
                ("Transformers\ndense mask", "packed_sdpa"), values, color=(STOCK_COLOR, PACKED_COLOR), width=0.6
            )
            axis.bar_label(bars, [label.format(value) for value in values], padding=4, fontweight="bold")
            axis.set_title(title)
            axis.set_ylabel(unit)
            axis.margins(y=0.15)
    return path


def _document_colors(pieces: Sequence[Piece]) -> list[str]:
    """A color for each source document (the pieces of one that was split share it), never that of the left neighbor."""
    colors: list[str] = []
    for piece in pieces:
        index = piece.document % len(_DOCUMENT_COLORS)
        if colors and colors[-1] == _DOCUMENT_COLORS[index]:
            index = (index + 1) % len(_DOCUMENT_COLORS)
        colors.append(_DOCUMENT_COLORS[index])
    return colors


def plot_packed_rows(path: Path, rows: PackedRows, most: int = 48) -> Path:
    """The first ``most`` rows as bars of coloured documents; padding is hatched."""
    shown = min(rows.num_rows, most)
    with _figure(path, 10, 1.6 + 0.17 * shown) as axis:
        for row in range(shown):
            pieces = rows.row_pieces(row)
            spans = [(piece.column, piece.length) for piece in pieces]
            axis.broken_barh(
                spans, (row - 0.42, 0.84), facecolors=_document_colors(pieces), edgecolor="white", linewidth=0.8
            )
            end = sum(piece.length for piece in pieces)
            if end < rows.seq_len:
                padding = [(end, rows.seq_len - end)]
                axis.broken_barh(
                    padding, (row - 0.42, 0.84), facecolor="#f4f4f4", edgecolor="#b8b8b8", hatch="////", linewidth=0
                )
        more = "" if shown == rows.num_rows else f", the first {shown} drawn"
        axis.set_title(
            f"{len(rows.pieces)} documents in {rows.num_rows} rows of {rows.seq_len:,} tokens{more}: "
            f"{rows.fill:.1%} full, padding hatched"
        )
        axis.set_xlim(0, rows.seq_len)
        axis.set_ylim(shown - 0.4, -0.6)
        axis.set_xlabel("token")
        axis.set_ylabel("row")
        axis.grid(visible=False)
        axis.yaxis.get_major_locator().set_params(integer=True)
    return path


_CONTENDER_STYLES: dict[str, dict[str, Any]] = {
    "packed_sdpa": {"label": "packed_sdpa", "color": PACKED_COLOR, "linewidth": 2.6, "marker": "o"},
    "loop_expanded": {"label": "SDPA a document, K/V expanded", "color": "#e0903f", "marker": "s"},
    "loop_gqa": {"label": "SDPA a document, enable_gqa", "color": "#c9a83c", "marker": "^"},
    "dense": {"label": "SDPA, dense mask", "color": STOCK_COLOR, "marker": "D"},
    "flex": {"label": "FlexAttention, compiled", "color": "#4a9d6e", "marker": "v"},
    "torch.mm": {"label": "torch.mm 2048", "color": "#999999", "linestyle": "--"},
}


def _draw_lines(axis: Any, lines: dict[str, list[tuple[float, float]]]) -> None:
    for name, style in _CONTENDER_STYLES.items():
        if lines.get(name):
            across, up = zip(*lines[name], strict=True)
            axis.plot(across, up, **{"markersize": 5, "linewidth": 1.6, **style})


def _powers_of_two(axis: Any, values: Sequence[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{value:,.0f}" for value in values], rotation=30 if len(values) > 5 else 0)
    axis.minorticks_off()


def _plain_log(axis: Any) -> None:
    """A logarithmic y axis with a plain number at each power of two."""
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.yaxis.set_minor_formatter("")


def _legend_below(axis: Any) -> None:
    """One legend for the whole figure, from one of its axes."""
    columns = 3 if axis.figure.get_figwidth() > 8 else 2
    axis.figure.legend(*axis.get_legend_handles_labels(), fontsize=9, ncols=columns, loc="outside lower center")


def _pick(rows: Sequence[dict[str, Any]], dtype: str, step: str) -> list[dict[str, Any]]:
    return [row for row in rows if "seconds" in row and row["dtype"] == dtype and row["pass"] == step]


def _panels(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(dtype, pass) of each panel: of each dtype forward and backward together, where that was measured."""
    measured = [row for row in rows if "seconds" in row]
    return [
        (dtype, max(row["pass"] for row in measured if row["dtype"] == dtype))
        for dtype in dict.fromkeys(row["dtype"] for row in measured)
    ]


def plot_kernels(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Useful GFLOP/s of each case as groups of bars, a panel a dtype. rows: of the benchmark's ``kernels``."""
    panels = _panels(rows)
    with _figure(path, 9, 3.6 * len(panels), rows=len(panels), squeeze=False) as axes:
        for axis, (dtype, step) in zip(axes[:, 0], panels, strict=True):
            speed = {(row["case"], row["contender"]): row["gflops"] for row in _pick(rows, dtype, step)}
            cases = list(dict.fromkeys(case for case, _ in speed))
            names = [name for name in _CONTENDER_STYLES if any((case, name) in speed for case in cases)]
            width = 0.84 / len(names)
            for place, name in enumerate(names):
                style = _CONTENDER_STYLES[name]
                spots = [index + (place - (len(names) - 1) / 2) * width for index in range(len(cases))]
                heights = [speed.get((case, name), 0.0) for case in cases]
                axis.bar(spots, heights, width=width * 0.92, color=style["color"], label=style["label"])
            titles = {row["case"]: row["title"].replace(", ", ",\n") for row in rows}
            axis.set_xticks(range(len(cases)), [f"{case}\n{titles[case]}" for case in cases], fontsize=9)
            axis.set_title(f"{dtype}, {step}")
            axis.set_ylabel("useful GFLOP/s")
        _legend_below(axes[0][0])
    return path


def plot_speed_by_length(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Useful GFLOP/s by mean document length, a panel a dtype. rows: of the benchmark's ``by_document_length``."""
    panels = _panels(rows)
    with _figure(path, 6.2 * len(panels), 4.8, columns=len(panels), squeeze=False) as axes:
        for axis, (dtype, step) in zip(axes[0], panels, strict=True):
            chosen = _pick(rows, dtype, step)
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in chosen:
                lines.setdefault(row["contender"], []).append((float(row["case"].split()[1]), row["gflops"]))
            _draw_lines(axis, lines)
            _powers_of_two(axis, sorted({length for line in lines.values() for length, _ in line}))
            _plain_log(axis)
            axis.set_title(f"{dtype}, {step}")
            axis.set_xlabel("mean length of a document, tokens")
            axis.set_ylabel("useful GFLOP/s")
        _legend_below(axes[0][0])
    return path


def plot_cost_per_token(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Microseconds a token by row length, a panel a dtype. rows: of the benchmark's ``by_row_length``."""
    panels = _panels(rows)
    with _figure(path, 6.2 * len(panels), 4.8, columns=len(panels), squeeze=False) as axes:
        for axis, (dtype, step) in zip(axes[0], panels, strict=True):
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in _pick(rows, dtype, step):
                size = float(row["case"].split()[1])
                if row["contender"] != "torch.mm":
                    lines.setdefault(row["contender"], []).append((size, row["seconds"] / size * 1e6))
            _draw_lines(axis, lines)
            _powers_of_two(axis, sorted({size for line in lines.values() for size, _ in line}))
            _plain_log(axis)
            axis.set_title(f"{dtype}, {step}: mean 512")
            axis.set_xlabel("tokens in the row")
            axis.set_ylabel("microseconds a token")
        _legend_below(axes[0][0])
    return path


def plot_memory(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Extra peak memory by row length. rows: of the benchmark's ``memory``."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if "extra_peak_mib" in row:
            lines.setdefault(row["contender"], []).append((row["seq_len"], max(row["extra_peak_mib"], 0.1)))
    with _figure(path, 6.6, 4.8) as axis:
        _draw_lines(axis, lines)
        _powers_of_two(axis, sorted({size for line in lines.values() for size, _ in line}))
        _plain_log(axis)
        axis.set_title("Peak memory beyond inputs, outputs and gradients")
        axis.set_xlabel("tokens in the row")
        axis.set_ylabel("MiB")
        _legend_below(axis)
    return path
