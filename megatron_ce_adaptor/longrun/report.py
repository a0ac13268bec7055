"""report.html (one file, no network, no script) and report.png, made from metrics.json and env.json."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import svg_charts
from .files import write_atomically
from .formatting import number, percent_text
from .gates import FAIL, PASS
from .svg_charts import Line, Mark

_SHOWN_ARGUMENTS = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "context_parallel_size", "data_parallel_size", "sequence_parallel",
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_experts", "moe_router_topk",
    "padded_vocab_size", "seq_length", "micro_batch_size", "global_batch_size", "train_iters", "lr", "min_lr",
    "lr_decay_style", "lr_warmup_iters", "weight_decay", "clip_grad", "seed", "bf16", "fp16",
    "transformer_impl", "use_distributed_optimizer", "distributed_backend", "data_path",
    "tokenizer_type", "tokenizer_model", "cross_entropy_loss_fusion",
)  # fmt: skip


class ReportError(Exception):
    """A report that cannot be made from this metrics.json; the message is one sentence for the user."""


def write_report(
    folder: str | Path, metrics: dict[str, Any], environment: dict[str, Any] | None = None
) -> list[Path]:
    """Write report.html and, if matplotlib is installed, report.png into `folder`; returns what was written.

    Raises ReportError if `metrics` is not what `build_metrics` makes, OSError if `folder` cannot be written.
    """
    folder = Path(folder)
    try:
        html = render_html(metrics, environment)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ReportError(
            f"metrics.json lacks what the report needs ({type(error).__name__}: {error}); run `megatron-ce "
            "compare` again."
        ) from error
    write_atomically(folder / "report.html", html)
    written = [folder / "report.html"]
    try:
        from .report_png import render_png
    except ModuleNotFoundError as error:
        (folder / "report.png").unlink(missing_ok=True)  # an older one would tell another story
        print(
            f"report.png is not written: {error.name} is not installed (pip install "
            "'megatron-ce-adaptor[longrun]').",
            file=sys.stderr,
        )
        return written
    write_atomically(folder / "report.png", render_png(metrics))
    return [*written, folder / "report.png"]


def render_html(metrics: dict[str, Any], environment: dict[str, Any] | None) -> str:
    """The page. Whatever comes from a log, a status file or the environment is escaped."""
    verdict = metrics["verdict"]
    word = "PASS" if verdict["passed"] else "FAIL"
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    sentence = str(verdict["sentence"]).removeprefix(f"{word}: ")
    failed = "" if verdict["passed"] else " failed"
    sections = [
        f'<section class="card verdict{failed}"><p class="word">{word}</p>'
        f"<p>{escape(sentence[:1].upper() + sentence[1:])}</p>{_tiles(metrics)}</section>",
        _gate_table(metrics["gates"]),
        f'<div class="charts">{"".join(_charts(metrics))}</div>',
        _run_table(metrics),
        _notes(metrics["comparison"]),
        _configuration(metrics),
        _environment(environment),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{word}: cross entropy te against native</title><style>\n{style}</style></head><body><main>\n"
        "<h1>Megatron cross entropy: <code>te</code> against <code>native</code></h1>\n"
        + "\n".join(filter(None, sections))
        + "\n</main></body></html>\n"
    )


def running_median(values: Sequence[float | None], window: int) -> list[float | None]:
    """Median of the `window` values around each; None where there is none."""
    half = window // 2
    result: list[float | None] = []
    for index in range(len(values)):
        near = [v for v in values[max(0, index - half) : index + half + 1] if v is not None]
        result.append(statistics.median(near) if near else None)
    return result


def after_warm_up(metrics: dict[str, Any], run: str) -> list[float]:
    """The run's step times that count, in ms."""
    times = metrics[run]["time info"][metrics["limits"]["warm_up_steps"] :]
    return [t for t in times if t is not None and t > 0]


def wants_log_axis(values: Sequence[float | None]) -> bool:
    """Whether a linear axis would press most of these values to its foot."""
    positive = sorted(v for v in values if v is not None and math.isfinite(v) and v > 0)
    return bool(positive) and positive[-1] > 20 * positive[len(positive) // 2]


def _tiles(metrics: dict[str, Any]) -> str:
    numbers = metrics["comparison"]
    loss, norm, time, memory = (numbers[k] for k in ("lm loss", "grad norm", "time info", "memo info"))
    te_calls = [c["te"] for c in metrics["te"]["cross entropy calls"] if c["te"]]
    kernels = sorted({c["implementation"] for c in metrics["te"]["cross entropy calls"] if c["te"]})
    tiles = [
        (
            "loss MAPE",
            _percent(loss["mape percent"]),
            f"limit {_percent(metrics['limits']['loss_mape_percent'])}",
        ),
        ("worst step", _percent(loss["worst percent"]), f"step {number(loss['worst step'])}"),
        ("grad norm MAPE", _percent(norm["mape percent"]), f"worst {_percent(norm['worst percent'])}"),
        ("step time, te / native", _times(time["ratio"]), f"{number(time['te']['median ms'])} ms with te"),
        ("memory, te / native", _times(memory["worst ratio"]), _memory_text(memory)),
        ("te calls a rank", number(min(te_calls)) if te_calls else "0", ", ".join(kernels) or "none"),
    ]
    cells = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b>'
        f"<span>{escape(extra)}</span></div>"
        for name, value, extra in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _percent(value: Any) -> str:
    return percent_text(value, 3)


def _times(value: Any) -> str:
    return "n/a" if value is None else f"{number(value, 4)} x"


def _memory_text(memory: dict[str, Any]) -> str:
    return "not measured" if memory["te peak MB"] is None else f"{number(memory['te peak MB'])} MB with te"


def _gate_table(gates: list[dict[str, Any]]) -> str:
    rows = []
    for gate in gates:
        status = gate["status"]
        style = {PASS: "pass", FAIL: "fail"}.get(status, "open")
        unit = gate["unit"].removesuffix(" or more")
        sign = "=" if gate["name"] == "equal step counts" else "≥" if gate["unit"] != unit else "≤"
        limit = "–" if gate["limit"] is None else f"{sign} {number(gate['limit'])} {unit}"
        value = "n/a" if gate["value"] is None else f"{number(gate['value'])} {unit}"
        rows.append(
            f"<tr><td>{escape(gate['name'])}<span class='soft'>{escape(gate['sentence'])}</span></td>"
            f'<td class="number">{escape(value)}</td><td class="number">{escape(limit)}</td>'
            f'<td class="status {style}">{escape(status)}</td></tr>'
        )
    return _section(
        "Gates", _table(rows, ("gate", "value", "limit", "result"), numbers=(1, 2), style="gates"), long=True
    )


def _charts(metrics: dict[str, Any]) -> list[str]:
    native, te, numbers = metrics["native"], metrics["te"], metrics["comparison"]
    both = [("native", "native"), ("te", "te")]
    floor = numbers.get("noise floor lm loss")

    def overlay(key: str, label: str) -> str:
        # native wide and pale beneath te's thin line: two curves that agree both stay visible
        lines = [Line(native["iteration"], native[key], "native wide"), Line(te["iteration"], te[key], "te")]
        return svg_charts.line_chart(lines, "step", label, log=wants_log_axis([*native[key], *te[key]]))

    error = numbers["lm loss"]
    window = max(5, len(error["steps"]) // 40)
    lines = [Line(error["steps"], error["percent"], "te thin")]
    legend = [("te", f"te, running median of {window} steps; pale: each step")]
    if floor:
        lines.append(Line(floor["steps"], running_median(floor["percent"], window), "floor"))
        legend.append(("floor", "noise floor: native against native perturbed by one ulp"))
    lines.append(Line(error["steps"], running_median(error["percent"], window), "te"))
    limit = metrics["limits"]["loss_mape_percent"]
    marks = [Mark(limit, f"limit of the mean: {number(limit)} %", "limit")] if limit else []
    if error["mape percent"]:
        marks.append(Mark(error["mape percent"], "", "te"))
        legend[0] = ("te", f"{legend[0][1]}; dashed: mean {_percent(error['mape percent'])}")
    times = [after_warm_up(metrics, run) for run in ("native", "te")]
    medians = [
        Mark(statistics.median(t), "", run, vertical=True)
        for t, run in zip(times, ("native", "te"), strict=True)
        if t
    ]
    warm_up = metrics["limits"]["warm_up_steps"]
    error_chart = svg_charts.line_chart(lines, "step", "percent", log=True, marks=marks)
    time_chart = svg_charts.histogram([(times[0], "native"), (times[1], "te")], "ms a step", medians)
    norm_mape = _percent(numbers["grad norm"]["mape percent"])
    return [
        _figure(
            "Loss",
            both,
            overlay("lm loss", "lm loss"),
            "Both runs, every step: native pale and wide, te thin upon it.",
        ),
        _figure(
            "Relative error of the loss",
            legend,
            error_chart,
            "|te − native| / |native| at each step, logarithmic; 0 lies at the foot.",
        ),
        _figure(
            "Gradient norm",
            both,
            overlay("grad norm", "grad norm"),
            f"Mean relative error {norm_mape}; a wrong gradient shows here before it shows in the loss.",
        ),
        _figure(
            "Step time",
            both,
            time_chart,
            f"Without the first {warm_up} steps and 1 % of outliers; dashed: medians.",
        ),
    ]


def _section(title: str, body: str, *, long: bool = False) -> str:
    return f'<section class="card{" long" if long else ""}"><h2>{escape(title)}</h2>{body}</section>'


def _figure(title: str, legend: Sequence[tuple[str, str]], chart: str, caption: str) -> str:
    entries = "".join(f'<span><i class="{escape(style)}"></i>{escape(text)}</span>' for style, text in legend)
    return (
        f'<figure class="card"><h2>{escape(title)}</h2><div class="legend">{entries}</div>{chart}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _table(
    rows: Sequence[str], head: Sequence[str] = (), numbers: Sequence[int] = (), style: str = ""
) -> str:
    cells = "".join(
        f'<th class="number">{escape(text)}</th>' if index in numbers else f"<th>{escape(text)}</th>"
        for index, text in enumerate(head)
    )
    thead = f"<thead><tr>{cells}</tr></thead>" if head else ""
    return f'<table class="{style}">{thead}<tbody>{"".join(rows)}</tbody></table>'


def _run_table(metrics: dict[str, Any]) -> str:
    numbers = metrics["comparison"]
    rows = []

    def row(name: str, values: Sequence[str]) -> None:
        cells = "".join(f'<td class="number">{escape(v)}</td>' for v in values)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")

    runs = [metrics["native"], metrics["te"]]
    speeds = [numbers["time info"]["native"], numbers["time info"]["te"]]
    row("log", [str(r["log"]) for r in runs])
    row("iteration lines", [number(len(r["iteration"])) for r in runs])
    row("first loss", [number(_edge(r["lm loss"], 0), 6) for r in runs])
    row("last loss", [number(_edge(r["lm loss"], -1), 6) for r in runs])
    row("median step, ms", [number(s["median ms"]) for s in speeds])
    row("mean step, ms", [number(s["mean ms"]) for s in speeds])
    row("tokens per second", [number(_whole(s["tokens/s"])) for s in speeds])
    row("peak memory, MB", [number(numbers["memo info"][f"{n} peak MB"]) for n in ("native", "te")])
    for kind in ("te", "native"):
        calls = [[c[kind] for c in r["cross entropy calls"] if c["te"] or c["native"]] for r in runs]
        row(f"{kind} calls a rank", [_range(c) for c in calls])
    return _section("The runs", _table(rows, ("", "native", "te"), numbers=(1, 2)))


def _edge(values: Sequence[float | None], index: int) -> float | None:
    there = [v for v in values if v is not None]
    return there[index] if there else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _range(values: Sequence[int]) -> str:
    if not values:
        return "not reported"
    low, high = min(values), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _notes(numbers: dict[str, Any]) -> str:
    items = [escape(str(note)) for note in numbers["notes"]]
    items += [
        f"Different argument, forced: {escape(str(d['name']))}: {escape(str(d['native']))} in native, "
        f"{escape(str(d['te']))} in te."
        for d in numbers["different arguments"]
    ]
    if not items:
        return ""
    return _section("Notes", f"<ul>{''.join(f'<li>{i}</li>' for i in items)}</ul>")


def _configuration(metrics: dict[str, Any]) -> str:
    arguments = metrics["te"]["arguments"]
    rows = [
        f"<tr><td>{_breakable(name)}</td><td>{escape(str(arguments[name]))}</td></tr>"
        for name in _SHOWN_ARGUMENTS
        if arguments.get(name) not in (None, "None", "")
    ]
    if not rows:
        return ""
    source = '<p class="soft">From the argument dump of the te run; of paths only the last part.</p>'
    return _section("Configuration", source + _table(rows), long=True)


def _environment(environment: dict[str, Any] | None) -> str:
    if not environment:
        return _section("Environment", '<p class="soft">No env.json beside these logs.</p>')
    rows: list[str] = []
    for key, value in environment.items():
        if value is None or value == {}:
            continue
        if isinstance(value, dict):
            rows += [_environment_row(f"{key}: {k}", v) for k, v in value.items() if v is not None]
        else:
            rows.append(_environment_row(str(key), value))
    return _section("Environment", _table(rows), long=True)


def _environment_row(name: str, value: Any) -> str:
    text = str(value)
    if "\n" in text:  # a tool's table, under its name so that it has the whole width
        return f'<tr><td colspan="2">{escape(name)}<pre>{escape(text)}</pre></td></tr>'
    return f"<tr><td>{_breakable(name)}</td><td>{escape(text)}</td></tr>"


def _breakable(name: str) -> str:
    """A long_name_with_underscores that a narrow table may break after one of them."""
    return escape(name).replace("_", "_<wbr>")
