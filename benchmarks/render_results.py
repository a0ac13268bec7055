#!/usr/bin/env python3
"""Make Markdown tables, and a plot, of the benchmark's JSON files.

    python benchmarks/render_results.py FILE.json... [--plot PLOT.png]

Exit status: 0 done, 2 a file is not a result.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import results

PASSES = 3  # over the logits: read in forward, read and written in backward


def percent_of_in_place(part: dict[str, Any], case: dict[str, Any], name: str) -> float | None:
    """Bytes of three passes a second, in percent of reading and writing in place in the same run."""
    entry = case["results"].get(name, {})
    if "ms" not in entry or "in_place_gb_per_s" not in part:
        return None
    return 100 * gb_per_s(case, entry["ms"]) / part["in_place_gb_per_s"]


def gb_per_s(case: dict[str, Any], ms: float) -> float:
    itemsize = {"bf16": 2, "fp32": 4}[case["dtype"]]
    return PASSES * case["rows"] * case["columns"] * itemsize / ms / 1e6


def markdown(part: dict[str, Any]) -> str:
    if part["part"].startswith("mass_"):
        return _mass_markdown(part)
    lines = [*_heading(part), ""]
    names = [p["name"] for p in part["peers"] if not p["missing"]]
    cases = part["cases"]
    lines += _table(
        "Forward + backward, ms",
        cases,
        names,
        lambda case, e: f"{e['ms']:.4g}" if "ms" in e else None,
    )
    ours = next((p["name"] for p in part["peers"] if p["ours"]), None)
    if ours is not None and len(names) > 1:
        lines += _table(
            f"Times as long as {ours} (median of paired rounds)",
            cases,
            names,
            lambda case, e: f"{e['times_ours'][ours]:.2f}" if ours in e.get("times_ours", {}) else None,
        )
    if "in_place_gb_per_s" in part:
        lines += _table(
            f"Percent of in-place read + write bandwidth ({part['in_place_gb_per_s']:.0f} GB/s in this run)",
            cases,
            names,
            lambda case, e: (
                f"{100 * gb_per_s(case, e['ms']) / part['in_place_gb_per_s']:.1f}" if "ms" in e else None
            ),
        )
    for title, key, digits in (
        ("Extra memory at the peak, in units of the logits", "extra_memory", ".2f"),
        ("Host time of a call, forward + backward, us", "host_us", ".0f"),
        ("The same of a first call after all other peers' turns, us", "cold_host_us", ".0f"),
        ("Time of a call until its work is done, us", "wall_us", ".0f"),
        ("Forward alone, ms", "forward_ms", ".4g"),
        ("Backward alone, ms", "backward_ms", ".4g"),
        ("Collectives a call", "collectives", "d"),
        ("Largest loss error against fp64", "loss_error", ".1e"),
        ("Gradient error against fp64, relative norm", "gradient_error", ".1e"),
        ("Largest loss error, confident tokens", "confident_loss_error", ".1e"),
        ("Gradient error, confident tokens", "confident_gradient_error", ".1e"),
    ):
        if any(key in e for c in cases for e in c["results"].values()):
            lines += _table(
                title, cases, names, lambda case, e, k=key, d=digits: f"{e[k]:{d}}" if k in e else None
            )
    missing = [f"- {p['name']}: {p['missing']}" for p in part["peers"] if p["missing"]]
    if missing:
        lines += ["Not measured:", "", *missing, ""]
    if part.get("not_begun"):
        lines += [f"Not measured, for lack of time: {', '.join(part['not_begun'])}", ""]
    skipped = [
        f"- {name} on {case['name']}: {entry['skipped']}"
        for case in cases
        for name, entry in case["results"].items()
        if "skipped" in entry
    ]
    if skipped:
        lines += ["Not taken by the peer:", "", *skipped, ""]
    broken = [
        f"- {name} on {case['name']}: {entry['error']}"
        for case in cases
        for name, entry in case["results"].items()
        if "error" in entry
    ]
    if broken:
        lines += ["Failed:", "", *broken, ""]
    return "\n".join(lines)


def _heading(part: dict[str, Any]) -> list[str]:
    e = part["environment"]
    where = e.get("gpu") or f"CPU, {e['threads']} threads"
    ranks = part["settings"].get("ranks", 1)
    versions = ", ".join(
        f"{p['name']} {p['version']}" for p in part["peers"] if p["version"] and p["version"] not in p["name"]
    )
    return [
        f"## {where}{f', {ranks} ranks (slowest rank)' if ranks > 1 else ''}, {e['date']}",
        "",
        f"torch {e['torch']}, triton {e['triton']}, Python {e['python']}. Versions: {versions}.",
    ]


def _table(title: str, cases: list[dict[str, Any]], names: list[str], cell: Any) -> list[str]:
    lines = [
        f"**{title}**",
        "",
        "| | " + " | ".join(c["name"] for c in cases) + " |",
        "|---" * (len(cases) + 1) + "|",
    ]
    for name in names:
        cells = [cell(c, c["results"].get(name, {})) or "" for c in cases]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _mass_markdown(part: dict[str, Any]) -> str:
    e = part["environment"]
    lines = [
        f"## {part['part'].replace('_', ' ')}, {e.get('gpu') or 'CPU'}, {e['date']}",
        "",
        "| | |",
        "|---|---|",
    ]
    for key, value in part["summary"].items():
        text = f"{value:.4g}" if isinstance(value, float) else value
        lines.append(f"| {key.replace('_', ' ')} | {text} |")
    return "\n".join([*lines, ""])


def plot(parts: list[dict[str, Any]], path: Path) -> None:
    """A bar chart for each part with peers: time as a multiple of ours, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [p for p in parts if p.get("cases") and not p["part"].startswith("mass_")]
    if not parts:
        raise SystemExit("no file with peers to plot")
    figure, axes = plt.subplots(len(parts), 1, figsize=(14, 5.5 * len(parts)), squeeze=False)
    for axis, part in zip(axes[:, 0], parts, strict=True):
        names = [p["name"] for p in part["peers"] if not p["missing"]]
        ours = next(p["name"] for p in part["peers"] if p["ours"])
        cases = part["cases"]
        width = 0.85 / len(names)
        for i, name in enumerate(names):
            values = [c["results"].get(name, {}).get("times_ours", {}).get(ours, float("nan")) for c in cases]
            colour = "black" if name == ours else plt.get_cmap("tab20")(i % 20)
            axis.bar([x + i * width for x in range(len(cases))], values, width, label=name, color=colour)
        axis.set_yscale("log")
        axis.axhline(1, color="black", linewidth=0.6)
        axis.set_xticks(
            [x + 0.42 for x in range(len(cases))], [c["name"] for c in cases], rotation=25, ha="right"
        )
        axis.set_ylabel(f"time / time of {ours}")
        where = part["environment"].get("gpu") or "CPU"
        axis.set_title(f"Forward + backward, {where}, {part['settings'].get('ranks', 1)} rank(s)")
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    partial = path.with_name("." + path.name)
    figure.savefig(partial, dpi=110)
    partial.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, metavar="PLOT.png")
    options = parser.parse_args(arguments)
    parts = results.read_or_exit(options.files)
    print("\n".join(markdown(part) for part in parts))
    if options.plot:
        plot(parts, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
