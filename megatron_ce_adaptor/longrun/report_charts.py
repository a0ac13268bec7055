"""The figures of report.html, and the preparation of curves that report.png shares with it."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from . import svg_charts
from .formatting import number, percent_text
from .svg_charts import Line, Mark

RUNS = ("native", "te")
_MOST_RANKS = 16  # of the memory chart; more bars cannot be told apart on a phone


def figures(metrics: dict[str, Any]) -> list[str]:
    """Loss, its relative error, gradient norm, its relative error, step time, peak memory: HTML figures."""
    norm_mape = percent_text(metrics["comparison"]["grad norm"]["mape percent"], 3)
    limits = metrics["limits"]
    return [
        _figure(
            "Loss",
            _both(),
            _overlay(metrics, "lm loss"),
            "Both runs, every step: native pale and wide, te thin upon it.",
        ),
        _error_figure(metrics, "lm loss", "Relative error of the loss", limits["loss_mape_percent"]),
        _figure(
            "Gradient norm",
            _both(),
            _overlay(metrics, "grad norm"),
            f"Mean relative error {norm_mape}; a wrong gradient shows here before it shows in the loss.",
        ),
        _error_figure(
            metrics, "grad norm", "Relative error of the gradient norm", limits["grad_norm_mape_percent"]
        ),
        _time_figure(metrics),
        _memory_figure(metrics),
    ]


def median_window(error: dict[str, Any]) -> int:
    """Over how many steps the running median of a relative error goes."""
    return max(5, len(error["steps"]) // 40)


def running_median(values: Sequence[float | None], window: int) -> list[float | None]:
    """Median of the `window` values around each; None where there is none."""
    half = window // 2
    near: list[float] = []  # those of the window, sorted; sorting each anew takes minutes on a long run
    result: list[float | None] = []
    for index in range(-half, len(values)):
        entering = values[index + half] if index + half < len(values) else None
        if entering is not None:
            bisect.insort(near, entering)
        leaving = values[index - half - 1] if index > half else None
        if leaving is not None:
            del near[bisect.bisect_left(near, leaving)]
        if index >= 0:
            middle = len(near) // 2
            result.append(None if not near else (near[middle] + near[-middle - 1]) / 2)
    return result


def after_warm_up(metrics: dict[str, Any], run: str) -> list[float]:
    """The run's step times that count, in ms."""
    times = metrics[run]["time info"][metrics["limits"]["warm_up_steps"] :]
    return [t for t in times if t is not None and t > 0]


def wants_log_axis(values: Sequence[float | None]) -> bool:
    """Whether a linear axis would press most of these values to its foot."""
    positive = sorted(v for v in values if v is not None and math.isfinite(v) and v > 0)
    return bool(positive) and positive[-1] > 20 * positive[len(positive) // 2]


def peak_memory(metrics: dict[str, Any]) -> tuple[list[int], dict[str, dict[int, float]]]:
    """The ranks to show, ascending, at most 16 (the fullest of them), and each run's peak MB by rank."""
    peaks = {
        run: {
            m["rank"]: m["max allocated memory"]
            for m in metrics[run]["memo info"]
            if m["max allocated memory"] > 0
        }
        for run in RUNS
    }
    ranks = sorted(
        peaks["native"].keys() | peaks["te"].keys(),
        key=lambda rank: -max(peaks[run].get(rank, 0.0) for run in RUNS),
    )
    return sorted(ranks[:_MOST_RANKS]), peaks


def _both() -> list[tuple[str, str]]:
    return [(run, run) for run in RUNS]


def _overlay(metrics: dict[str, Any], key: str) -> str:
    # native wide and pale beneath te's thin line: two curves that agree both stay visible
    native, te = metrics["native"], metrics["te"]
    lines = [Line(native["iteration"], native[key], "native wide"), Line(te["iteration"], te[key], "te")]
    return svg_charts.line_chart(lines, "step", key, log=wants_log_axis([*native[key], *te[key]]))


def _error_figure(metrics: dict[str, Any], key: str, title: str, limit: float | None) -> str:
    error = metrics["comparison"][key]
    floor = metrics["comparison"].get(f"noise floor {key}")
    window = median_window(error)
    lines = [Line(error["steps"], error["percent"], "te thin")]
    te_text = f"te, running median of {window} steps; pale: each step"
    marks = [Mark(limit, f"limit of the mean: {number(limit)} %", "limit")] if limit else []
    if error["mape percent"]:
        marks.append(Mark(error["mape percent"], "", "te"))
        te_text += f"; dashed: mean {percent_text(error['mape percent'], 3)}"
    legend = [("te", te_text)]
    if floor:
        lines.append(Line(floor["steps"], running_median(floor["percent"], window), "floor"))
        legend.append(
            (
                "floor",
                "noise floor: native against native perturbed by one ulp, mean "
                f"{percent_text(floor['mape percent'], 3)}",
            )
        )
    lines.append(Line(error["steps"], running_median(error["percent"], window), "te"))
    chart = svg_charts.line_chart(lines, "step", "percent", log=True, marks=marks)
    return _figure(
        title, legend, chart, "|te − native| / |native| at each step, logarithmic; 0 lies at the foot."
    )


def _time_figure(metrics: dict[str, Any]) -> str:
    times = {run: after_warm_up(metrics, run) for run in RUNS}
    medians = [Mark(statistics.median(times[run]), "", run, vertical=True) for run in RUNS if times[run]]
    chart = svg_charts.histogram([(times[run], run) for run in RUNS], "ms a step", medians)
    warm_up = metrics["limits"]["warm_up_steps"]
    caption = f"Without the first {warm_up} steps and 1 % of outliers; dashed: medians."
    return _figure("Step time", _both(), chart, caption)


def _memory_figure(metrics: dict[str, Any]) -> str:
    ranks, peaks = peak_memory(metrics)
    groups = [([peaks[run].get(rank) for rank in ranks], run) for run in RUNS]
    chart = svg_charts.bars([str(rank) for rank in ranks], groups, "rank", "MB")
    told = len(peaks["native"].keys() | peaks["te"].keys())
    caption = "Largest allocated memory that a rank reported, early in the run as Megatron prints it."
    if told > len(ranks):
        caption += f" The {len(ranks)} fullest of {told} ranks."
    if not ranks:
        caption = "Neither log has Megatron's memory lines (not measured)."
    return _figure("Peak memory", _both(), chart, caption)


def _figure(title: str, legend: Sequence[tuple[str, str]], chart: str, caption: str) -> str:
    entries = "".join(
        f'<span><i class="{escape(style)}"></i>{_unbroken(text)}</span>' for style, text in legend
    )
    return (
        f'<figure class="card"><h2>{escape(title)}</h2><div class="legend">{entries}</div>{chart}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _unbroken(text: str) -> str:
    """Escaped, and no line ends between a number and its percent sign."""
    return escape(text).replace(" %", "&nbsp;%")
