"""Which of Megatron's checkpoints are whole: sealed when they are finished, checked before they are loaded.

Megatron names its newest checkpoint in ``latest_checkpointed_iteration.txt`` and trusts it.  A file cut short
or a missing one shows itself only in the middle of loading, or not at all.  So the launcher seals every
checkpoint once Megatron has said that it is saved: ``mce_complete.json`` in the checkpoint's folder lists its
files with length and CRC-32, and the run it belongs to.  A checkpoint counts only if it is as its seal says.

The seal is made by the process that writes the log, after the log holds everything that was printed before
the checkpoint was saved, so a sealed checkpoint never lies ahead of the log.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ce_adaptor.longrun.files import strict_json, write_atomically

SEAL = "mce_complete.json"
TRACKER = "latest_checkpointed_iteration.txt"
KEPT = 2  # the newest, and the one before it in case the newest turns out damaged

_FOLDER = re.compile(r"iter_(\d{7,})\Z")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """One ``iter_NNNNNNN`` folder."""

    iteration: int
    folder: Path

    @property
    def is_sealed(self) -> bool:
        return (self.folder / SEAL).is_file()


def checkpoints_in(root: Path) -> list[Checkpoint]:
    """The checkpoints below `root`, whole or not, oldest first; none if there is no such folder."""
    if not root.is_dir():
        return []
    found = [
        Checkpoint(int(match[1]), entry)
        for entry in root.iterdir()
        if (match := _FOLDER.match(entry.name)) and entry.is_dir() and not entry.is_symlink()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.iteration)


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != SEAL and not path.name.startswith(f".{SEAL}."):
            yield path


def _crc32(path: Path, flush: bool = False) -> int:
    value = 0
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())  # before the seal, which must not outlive its files
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def seal(checkpoint: Checkpoint, run: str) -> None:
    """Write the seal of a checkpoint that Megatron has finished. OSError if it cannot be written.

    Args:
        run: which run it belongs to, such as ``te``.
    """
    files = {
        str(path.relative_to(checkpoint.folder)): {
            "bytes": path.stat().st_size,
            "crc32": _crc32(path, flush=True),
        }
        for path in _files(checkpoint.folder)
    }
    content = {"iteration": checkpoint.iteration, "run": run, "files": files}
    write_atomically(checkpoint.folder / SEAL, strict_json(content))


def _read_seal(checkpoint: Checkpoint) -> dict[str, Any] | None:
    try:
        content = json.loads((checkpoint.folder / SEAL).read_text(encoding="utf-8"))
        for facts in content["files"].values():
            int(facts["bytes"]), int(facts["crc32"])
        is_its_own = content["iteration"] == checkpoint.iteration and bool(content["run"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return content if is_its_own else None


def run_of(checkpoint: Checkpoint) -> str | None:
    """The run that a sealed checkpoint belongs to; None without a readable seal."""
    content = _read_seal(checkpoint)
    return None if content is None else str(content["run"])


def defect(checkpoint: Checkpoint) -> str | None:
    """What is wrong with a checkpoint, as the end of a sentence about it; None if it is whole."""
    if not checkpoint.is_sealed:
        return "was not finished"
    content = _read_seal(checkpoint)
    if content is None:
        return f"has an unreadable {SEAL}"
    for name, facts in content["files"].items():
        path = checkpoint.folder / name
        try:
            length = path.stat().st_size
            if length != facts["bytes"]:
                return f"has {length} of the {facts['bytes']} bytes of {name}"
            if _crc32(path) != facts["crc32"]:
                return f"has another {name} than was saved (the checksum differs)"
        except FileNotFoundError:
            return f"lacks its file {name}"
        except OSError as error:
            return f"cannot be read ({name}: {error.strerror or error})"
    return None


def newest_whole(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is as its seal says, and a sentence about every newer one that is not."""
    refused: list[str] = []
    for checkpoint in reversed(checkpoints_in(root)):
        problem = defect(checkpoint)
        if problem is None:
            return checkpoint, refused
        refused.append(f"The checkpoint of step {checkpoint.iteration} in {root} {problem}.")
    return None, refused


def make_newest(root: Path, chosen: Checkpoint | None) -> None:
    """Make `chosen` the one that Megatron loads, and clear away what a continued run will write again.

    Unfinished newer checkpoints are removed, damaged ones are renamed to ``<name>.damaged``. Without `chosen`
    the tracker file is removed too.
    """
    for checkpoint in checkpoints_in(root):
        if chosen is None or checkpoint.iteration > chosen.iteration:
            if checkpoint.is_sealed:
                damaged = checkpoint.folder.with_name(checkpoint.folder.name + ".damaged")
                shutil.rmtree(damaged, ignore_errors=True)
                checkpoint.folder.rename(damaged)
            else:
                shutil.rmtree(checkpoint.folder)
    if chosen is None:
        (root / TRACKER).unlink(missing_ok=True)
    else:
        write_atomically(root / TRACKER, str(chosen.iteration))


def prune(root: Path, keep: int) -> None:
    """Remove all but the `keep` newest sealed checkpoints; those that are newer than all of them stay."""
    sealed = [checkpoint for checkpoint in checkpoints_in(root) if checkpoint.is_sealed]
    if len(sealed) <= keep:
        return
    oldest_kept = sealed[-keep].iteration
    for checkpoint in checkpoints_in(root):
        if checkpoint.iteration < oldest_kept:
            (checkpoint.folder / SEAL).unlink(missing_ok=True)  # first: half removed is not whole
            shutil.rmtree(checkpoint.folder)
