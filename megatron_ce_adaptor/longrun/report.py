"""report.html (one file, no network, no script), report.png and the acceptance pages, from metrics.json."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from .acceptance import render_acceptance
from .files import write_atomically
from .formatting import implementation_text, number, percent_text
from .gates import FAIL, PASS
from .report_charts import RUNS, after_warm_up, figures
from .run_arguments import SHOWN_ARGUMENTS
from .run_folder import ACCEPTANCE, HTML, PNG

_SHARES = (5, 95, 99)  # percentiles of the step time beside the median


class ReportError(Exception):
    """A report that cannot be made from this metrics.json; the message is one sentence for the user."""


def write_report(
    folder: str | Path, metrics: dict[str, Any], environment: dict[str, Any] | None = None
) -> list[Path]:
    """Write report.html, the acceptance pages and, if matplotlib is installed, report.png into `folder`.

    Returns what was written.

    Raises ReportError if `metrics` is not what `build_metrics` makes, OSError if `folder` cannot be written.
    """
    folder = Path(folder)
    try:
        pages = {HTML: render_html(metrics, environment)}
        for language, name in ACCEPTANCE.items():
            pages[name] = render_acceptance(metrics, environment, language)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ReportError(
            f"metrics.json lacks what the report needs ({type(error).__name__}: {error}); run `megatron-ce "
            "compare` again."
        ) from error
    written = []
    for name, text in pages.items():
        write_atomically(folder / name, text)
        written.append(folder / name)
    try:
        from .report_png import render_png
    except ModuleNotFoundError as error:
        (folder / PNG).unlink(missing_ok=True)  # an older one would tell another story
        print(
            f"report.png is not written: {error.name} is not installed (pip install "
            "'megatron-ce-adaptor[longrun]').",
            file=sys.stderr,
        )
        return written
    write_atomically(folder / PNG, render_png(metrics))
    return [*written, folder / PNG]


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
        f'<div class="charts">{"".join(figures(metrics))}</div>',
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


def _tiles(metrics: dict[str, Any]) -> str:
    numbers = metrics["comparison"]
    loss, norm, time, memory = (numbers[k] for k in ("lm loss", "grad norm", "time info", "memo info"))
    te_calls = [c["te"] for c in metrics["te"]["cross entropy calls"] if c["te"]]
    kernels = sorted(
        {implementation_text(c["implementation"]) for c in metrics["te"]["cross entropy calls"] if c["te"]}
    )
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
        (
            "te calls a rank",
            number(min(te_calls)) if te_calls else "0" if metrics["te"]["cross entropy calls"] else "n/a",
            ", ".join(kernels) or "not shown by the log",
        ),
    ]
    floor = numbers["noise floor lm loss"]
    if floor:
        percent = _percent(floor["mape percent"])
        tiles.insert(2, ("noise floor, loss MAPE", percent, "native against native, one ulp"))
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


def _section(title: str, body: str, *, long: bool = False) -> str:
    return f'<section class="card{" long" if long else ""}"><h2>{escape(title)}</h2>{body}</section>'


def _table(
    rows: Sequence[str], head: Sequence[str] = (), numbers: Sequence[int] = (), style: str = ""
) -> str:
    cells = "".join(
        f'<th class="number">{escape(text)}</th>' if index in numbers else f"<th>{escape(text)}</th>"
        for index, text in enumerate(head)
    )
    thead = f"<thead><tr>{cells}</tr></thead>" if head else ""
    return f'<div class="wide"><table class="{style}">{thead}<tbody>{"".join(rows)}</tbody></table></div>'


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
    spread = [_percentiles(after_warm_up(metrics, run)) for run in RUNS]
    for index, share in enumerate(_SHARES):
        row(f"{share} % of steps within, ms", [number(values[index]) for values in spread])
    row("tokens per second", [number(_whole(s["tokens/s"])) for s in speeds])
    row("peak memory, MB", [number(numbers["memo info"][f"{n} peak MB"]) for n in ("native", "te")])
    for kind in ("te", "native"):
        calls = [[c[kind] for c in r["cross entropy calls"] if c["te"] or c["native"]] for r in runs]
        row(f"{kind} calls a rank", [_range(c) for c in calls])
    return _section("The runs", _table(rows, ("", "native", "te"), numbers=(1, 2)))


def _percentiles(times: Sequence[float]) -> list[float | None]:
    if len(times) < 2:
        return [None] * len(_SHARES)
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return [cuts[share - 1] for share in _SHARES]


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
        for name in SHOWN_ARGUMENTS
        if arguments.get(name) not in (None, "None", "")
    ]
    if not rows:
        return ""
    source = '<p class="soft">From the argument dump of the te run; of paths only the last part.</p>'
    return _section("Configuration", source + _table(rows), long=True)


def _environment(environment: dict[str, Any] | None) -> str:
    if not environment:
        return _section("Environment", '<p class="soft">No env.json beside these logs.</p>')
    facts: list[tuple[str, str]] = []
    for key, value in environment.items():
        if isinstance(value, dict):
            facts += [(f"{key}: {k}", str(v)) for k, v in value.items() if v is not None]
        elif value is not None:
            facts.append((str(key), str(value)))
    rows = [
        f"<tr><td>{_breakable(name)}</td><td>{escape(text)}</td></tr>"
        for name, text in facts
        if "\n" not in text
    ]
    # A tool's table stands below: in a cell, its width would be that of the page.
    below = [f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in facts if "\n" in text]
    return _section("Environment", _table(rows) + "".join(below), long=True)


def _breakable(name: str) -> str:
    """A long_name_with_underscores that a narrow table may break after one of them."""
    return escape(name).replace("_", "_<wbr>")
