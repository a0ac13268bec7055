"""The folder a comparison run leaves: which files are in it, and whether they may be compared.

native.log and te.log (or .log.gz), native.status.json and te.status.json, cmd.sh, env.json; optionally
noise_floor.log and gates.yaml. Compare adds metrics.json, report.html, report.png, acceptance.md and
acceptance.zh-CN.md (and tensorboard_curves/ if asked). A new run removes the verdict's files and puts
gates.yaml aside; a new native run also noise_floor.log, which belongs to the earlier.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .comparison import RunFacts
from .megatron_log import LogError, TrainingLog

METRICS, HTML, PNG, ENVIRONMENT, GATES = "metrics.json", "report.html", "report.png", "env.json", "gates.yaml"
ACCEPTANCE = {"en": "acceptance.md", "zh-CN": "acceptance.zh-CN.md"}
TENSORBOARD = "tensorboard_curves"  # not `tensorboard`: a run may write its own there


class RunFolderError(Exception):
    """A run folder that cannot be compared; the message is one sentence for the user."""


@dataclass(frozen=True)
class RunStatus:
    """What the launcher wrote when a run ended; every value but the first two may be missing."""

    complete: bool
    message: str
    exit_code: int | None = None
    steps: int | None = None
    last_stage_ranks: list[int] | None = None
    micro_batches_per_step: int | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None


def log_path(folder: Path, run: str) -> Path:
    """`run`.log or `run`.log.gz in `folder`; RunFolderError if there is neither."""
    for name in (f"{run}.log", f"{run}.log.gz"):
        if (folder / name).is_file():
            return folder / name
    raise RunFolderError(
        f"{folder} has no {run}.log (nor {run}.log.gz); it is not the folder of a finished {run} run."
    )


def has_log(folder: Path, run: str) -> bool:
    return any((folder / f"{run}.log{suffix}").is_file() for suffix in ("", ".gz"))


def load_status(folder: Path, run: str) -> RunStatus | None:
    """The status of `run`; None if the folder has no status files at all (logs put there by hand).

    Raises RunFolderError when the run did not complete, with the launcher's reason.
    """
    path = folder / f"{run}.status.json"
    if not path.is_file():
        others = sorted(p.name for p in folder.glob("*.status.json"))
        if others:
            raise RunFolderError(
                f"The {run} run in {folder} is incomplete: it left no {path.name} (there is "
                f"{', '.join(others)}), so it "
                "was killed or is still going on."
            )
        return None
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON ({error}); the {run} run must be repeated.") from None
    if not isinstance(content, dict) or not isinstance(content.get("complete"), bool):
        raise RunFolderError(f"{path} has no `complete: true|false`; it was not written by this launcher.")
    status = RunStatus(
        complete=content["complete"],
        message=str(content.get("message") or "no reason given"),
        exit_code=_whole(content, "exit_code"),
        steps=_whole(content, "steps"),
        last_stage_ranks=_whole_list(content, "last_stage_ranks"),
        micro_batches_per_step=_whole(content, "micro_batches_per_step"),
        sequence_length=_whole(content, "sequence_length"),
        global_batch_size=_whole(content, "global_batch_size"),
    )
    if not status.complete:
        raise RunFolderError(
            f"The {run} run in {folder} is incomplete (exit code {status.exit_code}, {status.steps} steps): "
            f"{status.message.rstrip('.')}."
        )
    return status


def facts_of(log: TrainingLog, status: RunStatus | None) -> RunFacts:
    """What the status file says, and the log where it is silent. LogError if they contradict each other."""
    told = RunFacts.from_log(log)
    if status is None:
        return told
    if status.steps is not None and max(log.steps) < status.steps // log.log_interval * log.log_interval:
        raise LogError(
            f"{log.label} ends at step {max(log.steps)}, but its status file says {status.steps} steps were "
            "run; "
            "the log is not that of this run, or was cut."
        )
    return RunFacts(
        last_stage_ranks=status.last_stage_ranks or told.last_stage_ranks,
        micro_batches_per_step=status.micro_batches_per_step or told.micro_batches_per_step,
        sequence_length=status.sequence_length or told.sequence_length,
        global_batch_size=status.global_batch_size or told.global_batch_size,
        from_launcher=True,
    )


def load_environment(folder: Path) -> dict[str, Any] | None:
    """env.json as a dict, None if there is none. RunFolderError if it is broken."""
    path = folder / ENVIRONMENT
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise RunFolderError(f"{path} must hold a JSON object.")
    return content


def _whole(content: dict[str, Any], key: str) -> int | None:
    value = content.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _whole_list(content: dict[str, Any], key: str) -> list[int] | None:
    value = content.get(key)
    return value if isinstance(value, list) and value and all(isinstance(v, int) for v in value) else None
