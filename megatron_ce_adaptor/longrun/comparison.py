"""Compare a `--cross-entropy-fusion-impl te` run with the same run with `native`; judge it by the gates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from .comparable import (
    ComparisonError,
    check_noise_floor,
    configuration_differences,
    listed_differences,
    refuse_same_run,
    refuse_te_baseline,
)
from .formatting import implementation_text, percent_text
from .gates import FAIL, NOT_ENFORCED, PASS, Gates, Outcome
from .megatron_log import Step, TrainingLog
from .run_arguments import Difference

EARLY_STEPS = (
    10  # before rounding differences have had time to grow, te and native agree to printing precision
)
_SMALL_LOSS = 0.5


@dataclass(frozen=True)
class RunFacts:
    """What a comparison needs beyond the lines of a log; None where neither log nor status file tells.

    `from_launcher`: this package's launcher recorded how the run ended, so its log must have our exit lines.
    """

    last_stage_ranks: list[int] | None = None
    micro_batches_per_step: int | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    from_launcher: bool = False

    @classmethod
    def from_log(cls, log: TrainingLog) -> RunFacts:
        return cls(
            log.last_stage_ranks, log.micro_batches_per_step, log.sequence_length, log.global_batch_size
        )


@dataclass(frozen=True)
class RelativeError:
    """|other - native| / |native| over the steps both have, in percent.

    Infinite where native's value is 0 and the other's is not. `one_sided` are steps whose lines are in both
    logs and whose value is in one only.
    """

    steps: list[int]
    percent: list[float]
    one_sided: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.percent) if self.percent else None

    @property
    def worst(self) -> float | None:
        return max(self.percent) if self.percent else None

    @property
    def worst_step(self) -> int | None:
        return self.steps[self.percent.index(max(self.percent))] if self.percent else None

    @property
    def early_mean(self) -> float | None:
        early = [p for s, p in zip(self.steps, self.percent, strict=True) if s <= EARLY_STEPS]
        return statistics.fmean(early) if early else None


@dataclass(frozen=True)
class Speed:
    """Step time after warm-up, in ms, and tokens per second of the whole job."""

    median_ms: float | None
    mean_ms: float | None
    tokens_per_second: float | None
    steps: int


@dataclass
class Comparison:
    """The result: numbers, one outcome per gate, and the verdict."""

    loss: RelativeError
    grad_norm: RelativeError
    native_speed: Speed
    te_speed: Speed
    step_time_ratio: float | None
    native_peak_mb: float | None
    te_peak_mb: float | None
    memory_ratio: float | None
    memory_rank: int | None
    differences: list[Difference] = field(default_factory=list)
    noise_loss: RelativeError | None = None
    noise_grad_norm: RelativeError | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    te_shown: bool = True  # some line of te's log tells which cross entropy ran

    @property
    def passed(self) -> bool:
        return all(o.status != FAIL for o in self.outcomes)

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        mean, worst = percent_text(self.loss.mean), percent_text(self.loss.worst)
        core = (
            f"over {len(self.loss.steps)} steps the lm loss of te differs from native's by {mean} in the mean"
        )
        core += f" and {worst} at most (step {self.loss.worst_step})" if self.loss.steps else ""
        failed = [o for o in self.outcomes if o.status == FAIL]
        if failed:
            return f"FAIL: {'; '.join(o.name for o in failed)} not met; {core}."
        unproven = "" if self.te_shown else ", but nothing in te's log shows that te ran"
        return f"PASS: {core}; every enforced gate is met{unproven}."


def compare(
    native: TrainingLog,
    te: TrainingLog,
    gates: Gates,
    *,
    native_facts: RunFacts | None = None,
    te_facts: RunFacts | None = None,
    noise_floor: TrainingLog | None = None,
    force: bool = False,
) -> Comparison:
    """Compare two complete logs.

    `noise_floor` is a third log: native once more with a perturbation of one ulp. Raises ComparisonError for
    swapped logs, for one run given twice, for a baseline that ran te itself, for logs without a common step,
    and for different configurations unless `force`.
    """
    refuse_same_run(native, te)
    refuse_te_baseline(native, te)
    differences = configuration_differences(native, te)
    if differences and not force:
        raise ComparisonError(
            f"The runs have different configurations ({len(differences)}): "
            f"{listed_differences(differences)}. "
            "Run both with the same arguments, or compare all the same with --force."
        )
    if not native.steps.keys() & te.steps.keys():
        raise ComparisonError(
            f"{native.label} (steps {min(native.steps)} to {max(native.steps)}) and {te.label} (steps "
            f"{min(te.steps)} to {max(te.steps)}) have no step in common; give two logs of the same steps."
        )
    if noise_floor is not None:
        check_noise_floor(noise_floor, native, te, force=force)
    native_facts = native_facts or RunFacts.from_log(native)
    te_facts = te_facts or RunFacts.from_log(te)
    native_speed = _speed(native, native_facts, gates.warm_up_steps)
    te_speed = _speed(te, te_facts, gates.warm_up_steps)
    ratio = (
        te_speed.median_ms / native_speed.median_ms if native_speed.median_ms and te_speed.median_ms else None
    )
    memory_ratio, memory_rank = _memory_ratio(native, te, te_facts)
    result = Comparison(
        loss=relative_error(native, te, "lm_loss"),
        grad_norm=relative_error(native, te, "grad_norm"),
        native_speed=native_speed,
        te_speed=te_speed,
        step_time_ratio=ratio,
        native_peak_mb=_peak(native, te_facts),
        te_peak_mb=_peak(te, te_facts),
        memory_ratio=memory_ratio,
        memory_rank=memory_rank,
        differences=differences,
    )
    if noise_floor is not None:
        result.noise_loss = relative_error(native, noise_floor, "lm_loss")
        result.noise_grad_norm = relative_error(native, noise_floor, "grad_norm")
    result.outcomes = [
        *_parity_outcomes(result, gates),
        *_completeness_outcomes(native, te, gates),
        *_call_outcomes(te, te_facts, gates, ours=te_facts.from_launcher or bool(native.calls or te.calls)),
        *_cost_outcomes(result, gates),
    ]
    if differences:
        names = ", ".join(d.name for d in differences)
        result.outcomes.append(
            Outcome(
                "same configuration",
                len(differences),
                0,
                "differences",
                NOT_ENFORCED,
                f"Forced; they differ in {names}.",
            )
        )
    result.te_shown = bool(te.calls)
    result.notes = _notes(native, te, noise_floor)
    return result


def relative_error(native: TrainingLog, other: TrainingLog, attribute: str) -> RelativeError:
    """Relative error in percent of `lm_loss` or `grad_norm` where both logs have a finite value."""
    steps, percent, one_sided = [], [], []
    # A step that was skipped or whose line is damaged has gates of its own.
    excused = {*native.damaged, *other.damaged, *native.skipped_steps, *other.skipped_steps}
    for iteration, step in native.steps.items():
        if iteration not in other.steps:
            continue
        a, b = getattr(step, attribute), getattr(other.steps[iteration], attribute)
        if a is None or b is None:
            if (a is None) != (b is None) and iteration not in excused:
                one_sided.append(iteration)
            continue
        if not math.isfinite(a) or not math.isfinite(b):
            continue
        if a == b == 0:  # a norm is printed with three decimals: both lie below the last one
            continue
        steps.append(iteration)
        percent.append(abs(b - a) / abs(a) * 100 if a else math.inf)
    return RelativeError(steps, percent, one_sided)


def _speed(log: TrainingLog, facts: RunFacts, warm_up: int) -> Speed:
    steps: Sequence[Step] = list(log.steps.values())
    times = [s.time_ms for s in steps[warm_up:] if s.time_ms is not None and s.time_ms > 0]
    if not times:
        return Speed(None, None, None, 0)
    median = statistics.median(times)
    tokens = None
    if facts.sequence_length and facts.global_batch_size:
        tokens = facts.sequence_length * facts.global_batch_size / (median / 1000)
    return Speed(median, statistics.fmean(times), tokens, len(times))


def _loss_memory(log: TrainingLog, facts: RunFacts) -> dict[int, float]:
    """Peak MB by rank, of the ranks that hold logits where that is known, else of all."""
    peaks = {rank: m.max_allocated for rank, m in log.memory.items() if m.max_allocated > 0}
    return {rank: p for rank, p in peaks.items() if rank in (facts.last_stage_ranks or ())} or peaks


def _peak(log: TrainingLog, facts: RunFacts) -> float | None:
    return max(_loss_memory(log, facts).values(), default=None)


def _memory_ratio(native: TrainingLog, te: TrainingLog, facts: RunFacts) -> tuple[float | None, int | None]:
    base, other = _loss_memory(native, facts), _loss_memory(te, facts)
    ratios = [(other[rank] / base[rank], rank) for rank in base if rank in other]
    return max(ratios) if ratios else (None, None)


def _at_most(
    name: str,
    value: float | None,
    limit: float | None,
    unit: str,
    enforced: bool,
    sentence: str,
    *,
    missing: str = "",
) -> Outcome:
    """An outcome of the form value <= limit; a value that is not there fails an enforced gate."""
    if value is not None and not math.isfinite(value):
        value = None
    if not enforced or limit is None:
        return Outcome(
            name, value, limit, unit, NOT_ENFORCED, sentence if value is not None else missing or sentence
        )
    if value is None:
        return Outcome(name, None, limit, unit, FAIL, missing or sentence)
    return Outcome(name, value, limit, unit, PASS if value <= limit else FAIL, sentence)


def _parity_outcomes(result: Comparison, gates: Gates) -> list[Outcome]:
    loss, norm = result.loss, result.grad_norm
    none = "No step has a finite, non-zero value in both logs."
    outcomes = [
        _at_most(
            "loss MAPE", loss.mean, gates.loss_mape_percent, "%", True,
            f"Mean of |te - native| / |native| of lm loss over {len(loss.steps)} steps; "
            f"{percent_text(loss.early_mean)} over the first {EARLY_STEPS}.", missing=none,
        ),
        _at_most(
            "loss at the worst step", loss.worst, gates.loss_worst_step_percent, "%", True,
            f"The largest relative error of lm loss is at step {loss.worst_step}.", missing=none,
        ),
        _grad_norm_outcome(norm, gates.grad_norm_mape_percent, none),
    ]  # fmt: skip
    if result.noise_loss is not None:
        floor = result.noise_loss.mean
        ratio = loss.mean / floor if loss.mean is not None and floor else None
        outcomes.append(
            _at_most(
                "loss MAPE over noise floor", ratio, gates.noise_floor_ratio, "x", True,
                f"Native against native perturbed by one ulp differs by {percent_text(floor)} in the mean, "
                f"{percent_text(result.noise_loss.worst)} at most.",
                missing="The perturbed run equals native to the last printed digit; there is no floor to "
                        "divide by.",
            )
        )  # fmt: skip
    return outcomes


def _grad_norm_outcome(norm: RelativeError, limit: float | None, none: str) -> Outcome:
    name = "grad norm MAPE"
    if norm.one_sided:  # the mean over the other steps would hide what happened at these
        return Outcome(
            name, norm.mean if norm.mean is not None and math.isfinite(norm.mean) else None, limit, "%",
            FAIL if limit is not None else NOT_ENFORCED,
            f"Steps whose line has a grad norm in one log only{_listed(norm.one_sided)}.",
        )  # fmt: skip
    if norm.worst == math.inf:
        none = f"native's grad norm is 0 at step {norm.worst_step} and te's is not."
    return _at_most(
        name, norm.mean, limit, "%", True,
        f"The same mean for grad norm over {len(norm.steps)} steps; the worst is "
        f"{percent_text(norm.worst)} at step {norm.worst_step}.", missing=none,
    )  # fmt: skip


def _completeness_outcomes(native: TrainingLog, te: TrainingLog, gates: Gates) -> list[Outcome]:
    outcomes = []
    for label, log in (("native", native), ("te", te)):
        unreadable = sorted(set(log.missing_steps) | set(log.damaged))
        outcomes += [
            _at_most(
                f"missing steps, {label}", len(unreadable), gates.max_missing_steps, "steps", True,
                f"{len(log.steps)} of the lines up to step {log.expected_last} are "
                f"there{_listed(unreadable)}.",
            ),
            _at_most(
                f"NaN steps, {label}", len(log.nan_steps), gates.max_nan_steps, "steps", True,
                f"Steps with NaN or infinity in lm loss or grad norm{_listed(log.nan_steps) or ': none'}.",
            ),
            _at_most(
                f"skipped steps, {label}", len(log.skipped_steps), gates.max_skipped_steps, "steps", True,
                f"Steps without an update{_listed(log.skipped_steps) or ': none'}.",
            ),
        ]  # fmt: skip
    counts = (len(native.steps), len(te.steps))
    outcomes.append(
        Outcome("equal step counts", counts[1], counts[0], "lines", PASS if counts[0] == counts[1] else FAIL,
                f"{counts[0]} iteration lines in native's log, {counts[1]} in te's.")
    )  # fmt: skip
    return outcomes


def _listed(steps: list[int]) -> str:
    return ": " + ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "") if steps else ""


def _call_outcomes(te: TrainingLog, facts: RunFacts, gates: Gates, *, ours: bool) -> list[Outcome]:
    """`ours`: the logs are of this package. Another stack's tell no calls, which is said, not judged."""
    ranks = facts.last_stage_ranks
    if ranks is None:
        ranks = sorted(rank for rank, calls in te.calls.items() if calls.te or calls.native)
    counts = [te.calls[rank].te if rank in te.calls else 0 for rank in ranks]
    least = min(counts, default=0)
    trained = max(te.steps) - te.loaded_iteration if te.loaded_iteration < min(te.steps) else max(te.steps)
    exact = facts.micro_batches_per_step is not None and te.starts <= 1
    # A killed process prints no exit line, so after a restart in the same log only `at all` can be asked for.
    wanted = trained * (facts.micro_batches_per_step or 0) if exact else 1
    # On any rank: a first stage that called native was not told of te, whatever the last stage did.
    native_callers = [rank for rank, calls in sorted(te.calls.items()) if calls.native]
    native_calls = sum(te.calls[rank].native for rank in native_callers)
    kernels = sorted({implementation_text(c.implementation) for c in te.calls.values() if c.te})
    enforced = gates.require_te_calls and ours
    if not ours:
        sentence = (
            "Neither log has this package's `cross entropy: te N calls` lines, so nothing shows that te ran; "
            "see to it otherwise."
        )
    elif not te.calls:
        sentence = (
            "te's log has no `cross entropy: te N calls` line, so nothing shows that te ran; if another "
            "stack wrote it, `require_te_calls: false` in a file given with --gates compares without it."
        )
    else:
        silent = [r for r, c in zip(ranks, counts, strict=True) if c < wanted]
        at = f"; too few at rank {_listed(silent)[2:]}" if silent else ""
        sentence = (
            f"Fewest te calls of the {len(ranks)} last-stage ranks ({', '.join(kernels) or 'none'}){at}."
        )
    enough = bool(ranks) and least >= max(wanted, 1)
    status = (PASS if enough else FAIL) if enforced else NOT_ENFORCED
    shown = least if te.calls else None
    none_native = PASS if native_calls == 0 else FAIL
    return [
        Outcome("te called", shown, max(wanted, 1), "calls or more", status, sentence),
        Outcome("native calls in the te run", native_calls if te.calls else None, 0, "calls",
                none_native if enforced else NOT_ENFORCED,
                "Calls of native's cross entropy while te was asked for, by rank"
                f"{_listed(native_callers) or ': none'}."),
    ]  # fmt: skip


def _cost_outcomes(result: Comparison, gates: Gates) -> list[Outcome]:
    native, te = result.native_speed, result.te_speed
    speed = "No step time after the warm-up in one of the logs."
    if native.median_ms is not None and te.median_ms is not None:
        speed = (
            f"Median step {te.median_ms:.1f} ms with te, {native.median_ms:.1f} ms with native, without "
            "the first "
            f"{gates.warm_up_steps} steps."
        )
        if not gates.enforce_step_time:
            speed += " Reported only: enforce_step_time is off, the device may be shared."
    memory = (
        f"te over native at rank {result.memory_rank}, the worst of the last stage, where the logits are."
    )
    return [
        _at_most(
            "step time, te / native", result.step_time_ratio, gates.step_time_ratio, "x",
            gates.enforce_step_time, speed,
        ),
        _at_most(
            "peak memory, te / native", result.memory_ratio, gates.memory_ratio, "x",
            gates.enforce_memory, memory,
            missing="No rank reports peak device memory in both logs.",
        ),
    ]  # fmt: skip


def _notes(native: TrainingLog, te: TrainingLog, floor: TrainingLog | None) -> list[str]:
    notes = []
    for label, log in (("native", native), ("te", te), *([("the noise floor", floor)] if floor else [])):
        notes += _notes_of(label, log)
    losses = [s.lm_loss for s in native.steps.values() if s.lm_loss is not None and math.isfinite(s.lm_loss)]
    if losses and min(losses) < _SMALL_LOSS:
        notes.append(
            f"native's loss goes down to {min(losses):.3g}; a relative error against a loss near 0 "
            "overstates differences."
        )
    if native.arguments and te.arguments:
        fused = [log.arguments.get("cross_entropy_loss_fusion") for log in (native, te)]
        if fused[0] != fused[1]:
            notes.append(f"cross_entropy_loss_fusion is {fused[0]} in native and {fused[1]} in te.")
    if floor is not None and (unusable := sorted({*floor.missing_steps, *floor.damaged, *floor.nan_steps})):
        notes.append(
            f"the noise floor is without {len(unusable)} steps (missing, damaged or NaN{_listed(unusable)})."
        )
    return notes


def _notes_of(label: str, log: TrainingLog) -> list[str]:
    notes = []
    if log.truncated:
        notes.append(f"{label}'s log is truncated and was compared all the same: {log.truncated}.")
    if log.replaced:
        notes.append(
            f"{label} was restarted: steps {log.replaced[0]} to {log.replaced[-1]} were printed more "
            f"than once, the later lines count ({len(log.replaced)} steps)."
        )
    if log.repeated:
        notes.append(
            f"{label}'s log has {log.repeated} lines twice, printed by more than one rank; each counts once."
        )
    if not log.arguments:
        notes.append(
            f"{label}'s log has no argument dump, so its configuration was checked only by its lines."
        )
    if log.mindspeed_active:
        notes.append(f"{label} ran with MindSpeed active, which replaces part of native's cross entropy.")
    if log.log_interval > 1:
        notes.append(f"{label}'s lines are means over {log.log_interval} steps (--log-interval).")
    return notes
