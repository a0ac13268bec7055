"""metrics.json: everything a verdict and a report are made from.

Per run the keys that Ascend's test tools use, `lm loss`, `grad norm`, `time info` (ms per step) and
`memo info` (MB per rank), one entry per line of the log. A value that was not printed
or not finite is null; the lists of steps beside the columns say why.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from .comparison import Comparison, RelativeError, RunFacts, Speed
from .files import strict_json, write_atomically
from .gates import Gates
from .megatron_log import CrossEntropyCalls, RankMemory, Step, TrainingLog
from .run_arguments import comparable_arguments

SCHEMA = 1
_COLUMNS = {
    "lm loss": "lm_loss",
    "grad norm": "grad_norm",
    "time info": "time_ms",
    "learning rate": "learning_rate",
    "global batch size": "global_batch_size",
    "skipped iterations": "skipped",
    "nan iterations": "nan",
}
# The argument that tells the runs apart is not comparable, but a report and a later check want it.
_TELLING = ("cross_entropy_fusion_impl", "cross_entropy_loss_fusion")


class MetricsError(Exception):
    """A metrics.json that cannot be used; the message is one sentence for the user."""


def build_metrics(
    native: TrainingLog,
    te: TrainingLog,
    gates: Gates,
    comparison: Comparison,
    *,
    native_facts: RunFacts | None = None,
    te_facts: RunFacts | None = None,
    noise_floor: TrainingLog | None = None,
) -> dict[str, Any]:
    """The content of metrics.json."""
    return {
        "schema": SCHEMA,
        "verdict": {"passed": comparison.passed, "sentence": comparison.sentence},
        "gates": [dataclasses.asdict(o) for o in comparison.outcomes],
        "limits": dataclasses.asdict(gates),
        "comparison": _comparison_numbers(comparison),
        "native": run_to_metrics(native, native_facts or RunFacts.from_log(native)),
        "te": run_to_metrics(te, te_facts or RunFacts.from_log(te)),
        "noise floor": run_to_metrics(noise_floor, RunFacts.from_log(noise_floor)) if noise_floor else None,
    }


def write_metrics(path: str | Path, metrics: dict[str, Any]) -> None:
    """Write metrics.json atomically, as strict JSON."""
    write_atomically(path, strict_json(metrics))


def read_metrics(path: str | Path) -> dict[str, Any]:
    """Read a metrics.json back; raises MetricsError if it is missing, broken or of another kind."""
    path = Path(path)
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MetricsError(f"{path} does not exist; run `megatron-ce compare {path.parent}` first.") from None
    except OSError as error:
        raise MetricsError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise MetricsError(
            f"{path} is not JSON ({error}); run `megatron-ce compare {path.parent}` again."
        ) from None
    if not isinstance(metrics, dict) or metrics.get("schema") != SCHEMA:
        raise MetricsError(
            f"{path} is not a metrics.json of this version (schema {SCHEMA}); run compare again."
        )
    missing = {"verdict", "gates", "limits", "comparison", "native", "te"} - metrics.keys()
    if missing:
        raise MetricsError(f"{path} lacks {', '.join(sorted(missing))}; run compare again.")
    return metrics


def run_to_metrics(log: TrainingLog, facts: RunFacts) -> dict[str, Any]:
    """One run's part of metrics.json."""
    steps = log.steps.values()
    arguments = comparable_arguments(log.arguments)
    arguments.update({name: log.arguments[name] for name in _TELLING if name in log.arguments})
    return {
        "log": log.name,
        "iteration": log.iterations,
        **{key: [_finite(getattr(s, attribute)) for s in steps] for key, attribute in _COLUMNS.items()},
        "memo info": [
            {"rank": rank, "allocated memory": m.allocated, "max allocated memory": m.max_allocated}
            for rank, m in sorted(log.memory.items())
        ],
        "cross entropy calls": [
            {"rank": rank, **dataclasses.asdict(c)} for rank, c in sorted(log.calls.items())
        ],
        "nan loss steps": [
            s.iteration for s in steps if s.lm_loss is not None and not math.isfinite(s.lm_loss)
        ],
        "nan grad norm steps": [
            s.iteration for s in steps if s.grad_norm is not None and not math.isfinite(s.grad_norm)
        ],
        "missing steps": log.missing_steps,
        "damaged steps": log.damaged,
        "replaced steps": log.replaced,
        "repeated lines": log.repeated,
        "truncated": log.truncated,
        "announced steps": log.announced_steps,
        "exit iteration": log.exit_iteration,
        "loaded iteration": log.loaded_iteration,
        "starts": log.starts,
        "facts": dataclasses.asdict(facts),
        "arguments": arguments,
    }


def run_from_metrics(run: dict[str, Any]) -> tuple[TrainingLog, RunFacts]:
    """The inverse of `run_to_metrics`: comparing what it returns gives the verdict of the logs themselves."""
    log = TrainingLog(
        name=run["log"],
        announced_steps=run["announced steps"],
        arguments=dict(run["arguments"]),
        memory={
            m["rank"]: RankMemory(m["allocated memory"], m["max allocated memory"]) for m in run["memo info"]
        },
        calls={
            c["rank"]: CrossEntropyCalls(c["te"], c["native"], c["implementation"])
            for c in run["cross entropy calls"]
        },
        replaced=list(run["replaced steps"]),
        damaged=list(run["damaged steps"]),
        starts=run["starts"],
        loaded_iteration=run["loaded iteration"],
        exit_iteration=run["exit iteration"],
        repeated=run.get("repeated lines", 0),  # an earlier version wrote neither
        truncated=run.get("truncated", ""),
    )
    for index, iteration in enumerate(run["iteration"]):
        log.steps[iteration] = Step(iteration, **{a: run[key][index] for key, a in _COLUMNS.items()})
    for iteration in run["nan loss steps"]:
        log.steps[iteration].lm_loss = math.nan
    for iteration in run["nan grad norm steps"]:
        log.steps[iteration].grad_norm = math.nan
    return log, RunFacts(**run["facts"])


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _comparison_numbers(comparison: Comparison) -> dict[str, Any]:
    def error(e: RelativeError | None) -> dict[str, Any] | None:
        if e is None:
            return None
        return {
            "mape percent": _finite(e.mean),
            "worst percent": _finite(e.worst),
            "worst step": e.worst_step,
            "early mape percent": _finite(e.early_mean),
            "steps": e.steps,
            "percent": [_finite(p) for p in e.percent],
        }

    def speed(s: Speed) -> dict[str, Any]:
        return {
            "median ms": s.median_ms,
            "mean ms": s.mean_ms,
            "tokens/s": s.tokens_per_second,
            "steps": s.steps,
        }

    return {
        "lm loss": error(comparison.loss),
        "grad norm": error(comparison.grad_norm),
        "noise floor lm loss": error(comparison.noise_loss),
        "noise floor grad norm": error(comparison.noise_grad_norm),
        "time info": {
            "native": speed(comparison.native_speed),
            "te": speed(comparison.te_speed),
            "ratio": comparison.step_time_ratio,
        },
        "memo info": {
            "native peak MB": comparison.native_peak_mb,
            "te peak MB": comparison.te_peak_mb,
            "worst ratio": comparison.memory_ratio,
            "worst rank": comparison.memory_rank,
        },
        "different arguments": [dataclasses.asdict(d) for d in comparison.differences],
        "notes": comparison.notes,
    }
