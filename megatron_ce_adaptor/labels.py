"""Whether labels are looked at, and what is said of one that is neither a class nor the ignored one."""

from __future__ import annotations

from torch import Tensor


def labels_are_checked(setting: bool | None, asked: bool | None, logits: Tensor) -> bool:
    """
    Args:
        setting: MCE_CHECK_LABELS.
        asked: what the door wants; None: on the CPU yes, on devices, where looking waits for them, no.
    """
    if setting is not None:
        return setting
    return logits.is_cpu if asked is None else asked


def refuse_unknown_labels(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raises ValueError naming the first label that is none of the classes."""
    if type(target) is Tensor and target.numel() > 0:
        low, high = map(int, target.aminmax())  # one operation that nearly always is enough
        if low >= 0 and high < classes:
            return
    bad = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bool(bad.any()):
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"target[{', '.join(map(str, where))}] is {int(target[where])}, expected a class in "
            f"[0, {classes}) or ignore_idx {ignore_index}; mark tokens without a target by ignore_idx."
        )
