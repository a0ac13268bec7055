"""`megatron-ce compare`: two logs, or a run folder, in; a table, a verdict and an exit status out."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import run_folder
from .comparison import Comparison, ComparisonError, RunFacts, compare
from .files import strict_json, write_atomically
from .formatting import number
from .gates import Gates, GatesError, Outcome, load_gates
from .megatron_log import LogError, TrainingLog, parse_log
from .metrics import build_metrics, write_metrics
from .report import ReportError, write_report

PASSED, VERDICT_NOT_MET, UNUSABLE_INPUT = 0, 1, 2
EPILOG = """\
examples:
  megatron-ce compare logs/2026-07-01_cpu_cpu_small       the verdict of a run folder, from its files
  megatron-ce compare native.log te.log --out result      any two Megatron logs; writes into result/
  megatron-ce compare native.log.gz te.log --json         numbers for another program
  megatron-ce compare NEW_DIR --native-from OLD_DIR       a new te run against an earlier native run

exit status: 0 every enforced gate is met, 1 one is not, 2 the input cannot be compared
"""


@dataclass
class _Inputs:
    native: TrainingLog
    te: TrainingLog
    native_facts: RunFacts
    te_facts: RunFacts
    noise_floor: TrainingLog | None
    environment: dict[str, Any] | None
    gates_source: str | None  # None: the defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-ce compare`."""
    parser.description = (
        "Compare a te run with the native run of the same configuration and judge it by the gates."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="DIR | NATIVE_LOG TE_LOG",
        help="a run folder, or native's log and te's log (text or .gz)",
    )
    parser.add_argument(
        "--native-from",
        type=Path,
        metavar="PATH",
        help="take the native run from this log or run folder instead",
    )
    parser.add_argument(
        "--te-from", type=Path, metavar="PATH", help="take the te run from this log or run folder instead"
    )
    parser.add_argument(
        "--noise-floor",
        type=Path,
        metavar="LOG",
        help="log of native with a one-ulp perturbation (default: DIR/noise_floor.log if it is there)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write metrics.json, report.html, report.png, acceptance.md and acceptance.zh-CN.md here "
        "(default: the run folder; nothing for two logs)",
    )
    parser.add_argument(
        "--gates",
        type=Path,
        metavar="FILE",
        help="limits in YAML (default: DIR/gates.yaml, else configs/gates.yaml)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="compare runs of different configurations or step counts, and truncated logs, all the same",
    )
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write the curves as TensorBoard event files, into tensorboard_curves/ beside the report",
    )
    parser.add_argument(
        "--json", action="store_true", help="print verdict, gates and numbers as JSON, no table"
    )


def run(args: argparse.Namespace) -> int:
    """Compare, print, write. Returns the exit status."""
    try:
        gates, inputs = _load(args)
        comparison = compare(
            inputs.native,
            inputs.te,
            gates,
            native_facts=inputs.native_facts,
            te_facts=inputs.te_facts,
            noise_floor=inputs.noise_floor,
            force=args.force,
        )
        if inputs.gates_source is not None:
            comparison.notes.insert(0, f"limits from {inputs.gates_source}, not configs/gates.yaml.")
        metrics = build_metrics(
            inputs.native,
            inputs.te,
            gates,
            comparison,
            native_facts=inputs.native_facts,
            te_facts=inputs.te_facts,
            noise_floor=inputs.noise_floor,
        )
        out = args.out or (args.paths[0] if len(args.paths) == 1 else None)
        if args.tensorboard and out is None:
            raise ComparisonError("--tensorboard writes beside the report; name a folder with --out.")
        written = _write(out, metrics, inputs.environment, args.tensorboard) if out is not None else []
        if args.gates is not None and args.out is None and len(args.paths) == 1:
            # So that `compare DIR` gives this verdict again.
            write_atomically(args.paths[0] / run_folder.GATES, args.gates.read_bytes())
    except (LogError, ComparisonError, GatesError, ReportError, run_folder.RunFolderError) as error:
        print(f"megatron-ce compare: {error}", file=sys.stderr)
        return UNUSABLE_INPUT
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"megatron-ce compare: cannot write{where}: {error.strerror or error}.", file=sys.stderr)
        return UNUSABLE_INPUT
    if args.json:
        print(
            strict_json({key: metrics[key] for key in ("verdict", "gates", "limits", "comparison")}), end=""
        )
    else:
        print_table(comparison, gates, inputs.native, inputs.te)
        for path in written:
            print(path)
    return PASSED if comparison.passed else VERDICT_NOT_MET


def print_table(comparison: Comparison, gates: Gates, native: TrainingLog, te: TrainingLog) -> None:
    """The gates as a table, then notes, then the verdict in one sentence."""
    rows = [(o.name, value_text(o.value, o.unit), limit_text(o), o.status) for o in comparison.outcomes]
    head = ("gate", "value", "limit", "result")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)]
    for row in [head, tuple("-" * w for w in widths), *rows]:
        left, value, limit, status = row
        print(f"{left:<{widths[0]}}  {value:>{widths[1]}}  {limit:>{widths[2]}}  {status}")
    print()
    for run_name, speed, peak in (
        ("native", comparison.native_speed, comparison.native_peak_mb),
        ("te", comparison.te_speed, comparison.te_peak_mb),
    ):
        parts = [f"{speed.median_ms:.1f} ms a step" if speed.median_ms is not None else "no step times"]
        if speed.tokens_per_second is not None:
            parts.append(f"{speed.tokens_per_second:,.0f} tokens/s")
        parts.append(f"peak memory {peak:,.0f} MB" if peak is not None else "memory not measured")
        print(f"{run_name:<7} {', '.join(parts)}")
    for note in comparison.notes:
        print(f"note: {note}")
    for outcome in comparison.outcomes:
        if outcome.status == "fail":
            print(f"failed: {outcome.name}: {outcome.sentence}")
    print(comparison.sentence)


def value_text(value: float | int | str | None, unit: str) -> str:
    """`0.179 %`, `200 calls`; `n/a` for None."""
    text = number(value)
    return text if text == "n/a" else f"{text} {unit.removesuffix(' or more')}"


def limit_text(outcome: Outcome) -> str:
    """`<= 2 %`, `>= 200 calls`; `-` where nothing is asked for."""
    if outcome.limit is None:
        return "-"
    sign = "=" if outcome.name == "equal step counts" else ">=" if outcome.unit.endswith("or more") else "<="
    return f"{sign} {value_text(outcome.limit, outcome.unit)}"


def _load(args: argparse.Namespace) -> tuple[Gates, _Inputs]:
    paths = list(args.paths)
    if len(paths) > 2:
        raise ComparisonError(
            f"{len(paths)} paths were given; give one run folder, or native's log and te's log."
        )
    folder = paths[0] if len(paths) == 1 else None
    if folder is not None and not folder.is_dir():
        what = "does not exist" if not folder.exists() else "is a single log"
        raise ComparisonError(f"{folder} {what}; give a run folder, or two logs: native's, then te's.")
    gates_file: Path | None = args.gates
    gates_source = gates_file.name if gates_file is not None else None  # no path: it stands in the report
    if gates_file is None and folder is not None and (folder / run_folder.GATES).is_file():
        gates_file = folder / run_folder.GATES
        gates_source = f"{folder.resolve().name}/{run_folder.GATES}"
    gates = load_gates(gates_file)
    native_source = args.native_from or paths[0]
    te_source = args.te_from or paths[-1]
    native, native_facts = _run(native_source, "native", args.force)
    te, te_facts = _run(te_source, "te", args.force)
    noise: TrainingLog | None = None
    if args.noise_floor is not None:
        noise = parse_log(args.noise_floor, allow_truncated=args.force)
    elif folder is not None and run_folder.has_log(folder, "noise_floor"):
        noise, _ = _run(folder, "noise_floor", args.force)
    environment = run_folder.load_environment(folder) if folder is not None else None
    return gates, _Inputs(native, te, native_facts, te_facts, noise, environment, gates_source)


def _run(source: Path, name: str, force: bool) -> tuple[TrainingLog, RunFacts]:
    if not source.is_dir():
        log = parse_log(source, allow_truncated=force)
        return log, RunFacts.from_log(log)
    # A noise floor may be put beside two runs by hand; the two runs themselves need their status.
    given = name != "noise_floor" or (source / f"{name}.status.json").is_file()
    status = run_folder.load_status(source, name) if given else None
    log = parse_log(run_folder.log_path(source, name), allow_truncated=force)
    return log, run_folder.facts_of(log, status)


def _write(
    out: Path, metrics: dict[str, Any], environment: dict[str, Any] | None, tensorboard: bool
) -> list[Path]:
    """The reports first: where metrics.json is, everything is."""
    out.mkdir(parents=True, exist_ok=True)
    (out / run_folder.METRICS).unlink(missing_ok=True)
    for stale in (out / run_folder.TENSORBOARD).glob("*/events.out.tfevents.0000000000.*"):
        stale.unlink()
    written = write_report(out, metrics, environment)
    if tensorboard:
        from .tensorboard_events import write_events

        written += write_events(out / run_folder.TENSORBOARD, metrics)
    write_metrics(out / run_folder.METRICS, metrics)
    return [*written, out / run_folder.METRICS]
