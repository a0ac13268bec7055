"""report.png: the report's verdict, gates and six charts as one picture, where a page cannot be shown."""

from __future__ import annotations

import io
import statistics
import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .formatting import number
from .gates import FAIL, PASS
from .report_charts import (
    RUNS,
    after_warm_up,
    median_window,
    peak_memory,
    running_median,
    wants_log_axis,
)

_NATIVE, _TE, _FLOOR, _BAD, _GOOD, _SOFT = "#1f6feb", "#c2410c", "#6b7280", "#b91c1c", "#15803d", "#5b6574"


def render_png(metrics: dict[str, Any]) -> bytes:
    """The picture's bytes (PNG, 1950 x 1800 pixels)."""
    figure = Figure(figsize=(13, 12), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    passed = metrics["verdict"]["passed"]
    word = "PASS" if passed else "FAIL"
    sentence = str(metrics["verdict"]["sentence"]).removeprefix(f"{word}: ")
    figure.text(
        0.04, 0.965, word, fontsize=22, fontweight="bold", color=_GOOD if passed else _BAD, va="center"
    )
    figure.text(
        0.125,
        0.965,
        _plain("\n".join(textwrap.wrap(sentence[:1].upper() + sentence[1:], 125))),
        fontsize=11,
        va="center",
    )
    grid = figure.add_gridspec(3, 3, left=0.06, right=0.98, top=0.9, bottom=0.05, hspace=0.38, wspace=0.26,
                               width_ratios=(1, 1, 0.75))  # fmt: skip
    limits = metrics["limits"]
    _overlay(figure.add_subplot(grid[0, 0]), metrics, "lm loss", "Loss")
    _error(figure.add_subplot(grid[0, 1]), metrics, "lm loss", "of the loss", limits["loss_mape_percent"])
    _overlay(figure.add_subplot(grid[1, 0]), metrics, "grad norm", "Gradient norm")
    _error(
        figure.add_subplot(grid[1, 1]),
        metrics,
        "grad norm",
        "of the gradient norm",
        limits["grad_norm_mape_percent"],
    )
    _times(figure.add_subplot(grid[2, 0]), metrics)
    _memory(figure.add_subplot(grid[2, 1]), metrics)
    _gates(figure.add_subplot(grid[:, 2]), metrics["gates"])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _plain(text: str) -> str:
    """Dollar signs from a log are text, not mathematics."""
    return text.replace("$", r"\$")


def _style(axes: Axes, title: str, x_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=20)
    axes.set_xlabel(x_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if x_label == "step":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if v is None else v for v in values]


def _overlay(axes: Axes, metrics: dict[str, Any], key: str, title: str) -> None:
    native, te = metrics["native"], metrics["te"]
    axes.plot(native["iteration"], _numbers(native[key]), color=_NATIVE, lw=4, alpha=0.4, label="native")
    axes.plot(te["iteration"], _numbers(te[key]), color=_TE, lw=1, label="te")
    if wants_log_axis([*native[key], *te[key]]):
        axes.set_yscale("log")
    _legend(axes)
    _style(axes, title, "step")


def _error(axes: Axes, metrics: dict[str, Any], key: str, what: str, limit: float | None) -> None:
    error, floor = metrics["comparison"][key], metrics["comparison"].get(f"noise floor {key}")
    axes.set_yscale("log")
    positive = [p for p in error["percent"] if p]
    foot = min(positive, default=1e-6)
    window = median_window(error)

    def shown(values: list[float | None]) -> list[float]:
        return [float("nan") if v is None else max(v, foot) for v in values]

    axes.plot(error["steps"], shown(error["percent"]), color=_TE, lw=0.6, alpha=0.4)
    if floor:
        axes.plot(
            floor["steps"],
            shown(running_median(floor["percent"], window)),
            color=_FLOOR,
            lw=1.2,
            label="noise floor",
        )
    axes.plot(
        error["steps"],
        shown(running_median(error["percent"], window)),
        color=_TE,
        lw=1.4,
        label="te, running median",
    )
    if limit:
        axes.axhline(limit, color=_BAD, ls="--", lw=1.2, label=f"limit of the mean {number(limit)} %")
    _legend(axes)
    _style(axes, f"Relative error {what}, %", "step")


def _legend(axes: Axes) -> None:
    """Between title and plot: inside, it would sooner or later cover a curve or the limit."""
    axes.legend(
        fontsize=8,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.985),
        ncols=3,
        columnspacing=1.2,
        handlelength=1.6,
    )


def _times(axes: Axes, metrics: dict[str, Any]) -> None:
    _style(axes, "Step time", "ms a step")
    groups = {run: after_warm_up(metrics, run) for run in RUNS}
    everything = sorted(t for times in groups.values() for t in times)
    if not everything:
        _say(axes, "no step times")
        return
    low, high = (
        everything[int(0.005 * (len(everything) - 1))],
        everything[-int(0.005 * (len(everything) - 1)) - 1],
    )
    if high <= low:
        low, high = low - 0.5, high + 0.5
    for run, colour in (("native", _NATIVE), ("te", _TE)):
        if groups[run]:
            median = statistics.median(groups[run])
            axes.hist(
                groups[run],
                bins=36,
                range=(low, high),
                color=colour,
                alpha=0.45,
                label=f"{run}, median {median:.1f}",
            )
            axes.axvline(median, color=colour, ls="--", lw=1.2)
    _legend(axes)


def _memory(axes: Axes, metrics: dict[str, Any]) -> None:
    ranks, peaks = peak_memory(metrics)
    _style(axes, "Peak memory, MB", "rank")
    if not ranks:
        _say(axes, "not measured")
        return
    for offset, run, colour in ((-0.2, "native", _NATIVE), (0.2, "te", _TE)):
        values = [peaks[run].get(rank, float("nan")) for rank in ranks]
        axes.bar(
            [i + offset for i in range(len(ranks))], values, width=0.38, color=colour, alpha=0.45, label=run
        )
    axes.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
    _legend(axes)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=_SOFT)


def _gates(axes: Axes, gates: list[dict[str, Any]]) -> None:
    axes.axis("off")
    axes.set_title("Gates", loc="left", fontsize=11, fontweight="bold")
    height = 1 / max(len(gates), 1)
    for index, gate in enumerate(gates):
        y = 1 - (index + 0.5) * height
        colour = {PASS: _GOOD, FAIL: _BAD}.get(gate["status"], _SOFT)
        unit = gate["unit"].removesuffix(" or more")
        value = "n/a" if gate["value"] is None else f"{number(gate['value'])} {unit}"
        sign = "=" if gate["name"] == "equal step counts" else "≥" if gate["unit"] != unit else "≤"
        limit = "" if gate["limit"] is None else f", limit {sign} {number(gate['limit'])}"
        axes.text(0, y, _plain(gate["name"]), fontsize=9, va="bottom", transform=axes.transAxes)
        axes.text(
            0, y, _plain(f"{value}{limit}"), fontsize=8, va="top", color=_SOFT, transform=axes.transAxes
        )
        axes.text(
            1, y, gate["status"], fontsize=9, va="bottom", ha="right", color=colour, transform=axes.transAxes
        )
