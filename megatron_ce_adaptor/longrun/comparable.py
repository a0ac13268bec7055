"""May these logs be compared? What must hold before a number means anything, else a refusal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .megatron_log import TrainingLog
from .run_arguments import Difference, argument_differences

_SHOWN_WITH_VALUES = 5  # of the differing arguments; the others are named


class ComparisonError(Exception):
    """Two runs that cannot be compared; the message is one sentence for the user."""


def refuse_same_run(a: TrainingLog, b: TrainingLog) -> None:
    """One run given twice differs from itself by 0 %. Its step times give it away, also in a copy.

    Raises:
        ComparisonError: both logs have the same steps, losses and step times.
    """
    if a.steps.keys() != b.steps.keys() or all(s.time_ms is None for s in a.steps.values()):
        return
    for iteration, step in a.steps.items():
        other = b.steps[iteration]
        # repr: a NaN equals itself here
        if repr((step.lm_loss, step.grad_norm, step.time_ms)) != repr(
            (other.lm_loss, other.grad_norm, other.time_ms)
        ):
            return
    which = "is given twice" if a.label == b.label else f"and {b.label} are the log of one run"
    raise ComparisonError(
        f"{a.label} {which} (every loss and every step time is the same); give the logs of two runs."
    )


def refuse_te_baseline(native: TrainingLog, te: TrainingLog) -> None:
    """te against te passes every gate, so whatever shows that the baseline ran te is refused.

    te's own dump may well show native: the patch of validate_args hides te while that prints.
    """
    impl = [log.arguments.get("cross_entropy_fusion_impl") for log in (native, te)]
    if impl == ["te", "native"]:
        raise ComparisonError(
            f"The logs look swapped: {native.label} was run with te and {te.label} with native; give "
            "native's log first."
        )
    _refuse_te(
        native, "is no baseline", "give native's log first, run with --cross-entropy-fusion-impl native"
    )


def configuration_differences(native: TrainingLog, other: TrainingLog) -> list[Difference]:
    """What the argument dumps, the announced steps and the lines themselves say differs."""
    if native.arguments and other.arguments:
        found = argument_differences(native.arguments, other.arguments)
    else:
        found = []
    if native.announced_steps != other.announced_steps and not any(d.name == "train_iters" for d in found):
        found.append(Difference("train_iters", str(native.announced_steps), str(other.announced_steps)))
    # Also where no arguments were dumped, each line tells its learning rate and batch size.
    for attribute in ("learning_rate", "global_batch_size"):
        for iteration, step in native.steps.items():
            a, b = getattr(step, attribute), getattr(other.steps.get(iteration), attribute, None)
            if a is not None and b is not None and not math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12):
                found.append(Difference(f"{attribute} of step {iteration}", str(a), str(b)))
                break
    return found


def listed_differences(differences: Sequence[Difference], other: str = "te") -> str:
    """The first differences with both values, the rest by name."""
    shown = "; ".join(d.against(other) for d in differences[:_SHOWN_WITH_VALUES])
    rest = ", ".join(d.name for d in differences[_SHOWN_WITH_VALUES:])
    return f"{shown}; also {rest}" if rest else shown


def check_noise_floor(
    floor: TrainingLog, native: TrainingLog, te: TrainingLog, *, force: bool = False
) -> None:
    """The noise floor is native once more: of the same configuration, another run, and not te.

    Raises:
        ComparisonError: it is none of these, or has no step in common with native. `force` lets a different
            configuration pass.
    """
    for log in (native, te):
        refuse_same_run(floor, log)
    _refuse_te(floor, "is no noise floor", "give a second run of native, its first logits changed by one ulp")
    differences = configuration_differences(native, floor)
    if differences and not force:
        raise ComparisonError(
            f"The noise floor {floor.label} has another configuration than native ({len(differences)}): "
            f"{listed_differences(differences, 'the noise floor')}. Run it with native's arguments, or "
            "compare all the same with --force."
        )
    if not native.steps.keys() & floor.steps.keys():
        raise ComparisonError(
            f"The noise floor {floor.label} has no step in common with {native.label}; run it over the same "
            "steps."
        )


def _refuse_te(log: TrainingLog, what: str, instead: str) -> None:
    says_te = log.arguments.get("cross_entropy_fusion_impl") == "te"
    # Without loss fusion nothing reads the choice.
    if says_te and log.arguments.get("cross_entropy_loss_fusion") != "False":
        raise ComparisonError(
            f"{log.label} {what}: its arguments say cross_entropy_fusion_impl te; {instead}."
        )
    callers = [str(rank) for rank, calls in sorted(log.calls.items()) if calls.te]
    if callers:
        shown = ", ".join(callers[:8]) + (", ..." if len(callers) > 8 else "")
        raise ComparisonError(f"{log.label} {what}: rank {shown} called te; {instead}.")
