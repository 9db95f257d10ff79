"""What all figures share: colours, error bars, labels at the data, and files that do not change from day to day."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from ..recorder import atomic_write
from . import stats

# Okabe and Ito: distinct under the common colour-vision deficiencies, and in grey.
BLUE, ORANGE, GREEN, PURPLE, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#222222", "#8A8A8A"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "svg.hashsalt": "backrank",
    "svg.fonttype": "path",
}


class Missing(Exception):
    """The runs that a figure needs are not there: says which."""


def new(width: float, height: float, columns: int = 1, rows: int = 1, **options):
    """Figure (inches) with a row of axes, or an array of several rows; room for the footer is kept at the bottom."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.055, 1, 0.945), w_pad=0.08)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes[0] if rows == 1 else axes


def mean_ci(ax, x, values, colour, horizontal: bool = False, **marker) -> stats.Estimate:
    """Mean and 95 % interval over seeds at position x; a single seed has no bar."""
    e = values if isinstance(values, stats.Estimate) else stats.estimate(values)
    half = np.nan_to_num(e.high - e.mean)
    at, bar = ((e.mean, x), {"xerr": half}) if horizontal else ((x, e.mean), {"yerr": half})
    ax.errorbar(*at, **bar, fmt="o", ms=6, capsize=3, lw=1.6, color=colour, zorder=3, **marker)
    return e


def spread(positions, gap: float) -> np.ndarray:
    """Move label positions apart until neighbours are `gap` away, keeping their order and their mean."""
    positions = np.asarray(positions, float)
    order = np.argsort(positions, kind="stable")
    moved = positions[order].copy()
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    moved += positions.mean() - moved.mean()
    return moved[np.argsort(order)]


def save(draw, stem: Path, footer: str) -> None:
    """Draw under STYLE, add the footer, write <stem>.png and <stem>.svg. Errors of `draw` (Missing) pass through."""
    with rc_context(STYLE):
        figure: Figure = draw()
        figure.text(0.008, 0.012, footer, fontsize=7.5, color=GREY)
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
            atomic_write(stem.with_suffix(f".{kind}"), buffer.getvalue())
