"""``megatron-ce pretrain --save-every N --resume``: where checkpoints go, and which one is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ce_adaptor.longrun import checkpoints
from megatron_ce_adaptor.longrun.config import RunConfig
from megatron_ce_adaptor.longrun.preflight import Refused

FOLDER = "checkpoints"  # below the output folder, where the configuration names none
FULL_DISK = ("No space left on device", "Disk quota exceeded", "File too large")

# With one of these Megatron saves or loads less than the state of a run.
_PARTIAL_STATE = (
    "--finetune",
    "--no-save-optim",
    "--no-load-optim",
    "--no-save-rng",
    "--no-load-rng",
    "--async-save",  # Megatron says "saved" before it is
)


def checkpoint_root(config: RunConfig, variables: Mapping[str, str], folder: Path, name: str) -> Path:
    """Where the run `name` keeps its checkpoints: the configuration's ``--save``, else below `folder`."""
    words = config.values("--save", variables)
    return Path(words[0]) if words else folder / FOLDER / name


def with_checkpoints(
    config: RunConfig, variables: Mapping[str, str], root: Path, every: int | None, resume: bool
) -> RunConfig:
    """`config` with what saves a checkpoint into `root` every so many steps.

    Args:
        every: steps between two checkpoints; None as the configuration says.

    Raises:
        Refused: the configuration saves nothing, or not all that a run needs to continue.
    """
    if every is None and not resume:
        return config
    for flag in _PARTIAL_STATE:
        if config.is_set(flag):
            raise Refused(
                f"{config.path} has {flag}: such a run cannot be continued; leave out that flag, or "
                "--save-every and --resume."
            )
    if every is None:
        if not config.values("--save", variables) or not config.values("--save-interval", variables):
            raise Refused(
                f"{config.path} saves no checkpoints that could be resumed: add --save-every N to every "
                "start of the run."
            )
        return config
    if every < 1:
        raise Refused(f"--save-every is {every}: expected a number of steps, at least 1.")
    return config.with_arguments({"--save": str(root), "--save-interval": every})


def check_load(config: RunConfig, variables: Mapping[str, str]) -> None:
    """Refuse a configuration that loads from a folder without a checkpoint.

    Megatron would warn and train on from random weights. Where it saves into the same folder, the first start
    finds none, and that is meant.

    Raises:
        Refused: the folder after --load has no checkpoint.
    """
    words = config.values("--load", variables)
    if not words or words == config.values("--save", variables):
        return
    if not (Path(words[0]) / checkpoints.TRACKER).is_file():
        raise Refused(
            f"{config.path} loads from {words[0]}, and there is no checkpoint (no {checkpoints.TRACKER}): "
            "name the folder that one was saved into, or leave out --load to train from the beginning."
        )


def is_complete(folder: Path, name: str, steps: int) -> bool:
    """Whether the run `name` in `folder` has ended well after `steps` steps."""
    status = _status(folder, name)
    return (
        status is not None
        and status.get("complete") is True
        and status.get("steps") == steps
        and any((folder / f"{name}.log{packed}").is_file() for packed in ("", ".gz"))
    )


def _status(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / f"{name}.status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def begin_anew(root: Path, is_ours: bool) -> None:
    """Make way for the checkpoints of a run that starts at step 1.

    Below the output folder (`is_ours`) those of an earlier run are kept as ``<name>.previous``.

    Raises:
        Refused: a folder of the user's holds checkpoints: this run would write over them or clear them away,
            and a later --resume take them for its own.
    """
    found = checkpoints.checkpoints_in(root)
    if not found:
        return
    if is_ours:
        previous = root.with_name(root.name + ".previous")
        shutil.rmtree(previous, ignore_errors=True)
        root.rename(previous)
        return
    # Those without a seal too: Megatron may have made them without this launcher.
    steps = ", ".join(str(checkpoint.iteration) for checkpoint in found)
    raise Refused(
        f"{root} holds checkpoints of an earlier run (step {steps}): continue it with --resume, remove them, "
        "or name another folder."
    )


def find(root: Path, run: str, was_started: bool) -> tuple[int, list[str]]:
    """Which step a resumed run continues from, and what there is to say about it. Changes nothing.

    Args:
        run: what the seals must say.
        was_started: the output folder has a record of an earlier start, so that having no checkpoint means
            that it ended before the first.

    Returns:
        The iteration of the checkpoint to load, 0 to start at step 1; sentences for the user.

    Raises:
        Refused: there is nothing to continue, or only damaged checkpoints, or another run's.
    """
    chosen, refused = checkpoints.newest_whole(root)
    if chosen is not None:
        saved_by = checkpoints.run_of(chosen)
        if saved_by != run:
            raise Refused(
                f"The checkpoint {chosen.folder} is that of a {saved_by} run, not of {run}: give every run a "
                "folder of its own."
            )
        return chosen.iteration, [*refused, f"Continuing from the checkpoint of step {chosen.iteration}."]
    damaged = [c for c in checkpoints.checkpoints_in(root) if c.is_sealed]
    if damaged:
        raise Refused(
            f"{' '.join(refused)} No checkpoint is left to continue from; start again without --resume."
        )
    if not was_started:
        raise Refused(
            f"There is no checkpoint in {root} and no earlier start on record: nothing to resume; leave out "
            "--resume to start at step 1."
        )
    return 0, [*refused, f"There is no finished checkpoint in {root} yet: starting at step 1."]


def settle(root: Path, iteration: int) -> None:
    """Carry out what :func:`find` decided: Megatron will load `iteration`, and newer remains are gone."""
    chosen = next((c for c in checkpoints.checkpoints_in(root) if c.iteration == iteration), None)
    checkpoints.make_newest(root, chosen)
