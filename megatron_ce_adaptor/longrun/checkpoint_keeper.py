"""Seals checkpoints while a run goes on: watches the log for Megatron's word that one is saved."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_ce_adaptor.longrun import checkpoints
from megatron_ce_adaptor.longrun.checkpoints import Checkpoint

# The first rank prints it when every rank has written its part.
_SAVED = re.compile(rb"successfully saved checkpoint from iteration\s+(\d+) to ")
_LONGEST_PHRASE = 256  # bytes: what may stand before the number, if the text comes in pieces


class CheckpointKeeper(threading.Thread):
    """Seals each checkpoint that the log reports, then removes those that are no longer needed.

    Args:
        root: the folder that Megatron saves into.
        run: what the seals name, see :func:`checkpoints.seal`.
        keep: how many checkpoints stay; None keeps all.
        before_sealing: brings the log to the disk, so that a sealed checkpoint is not ahead of it after a
            power failure either.
    """

    def __init__(
        self, root: Path, run: str, keep: int | None, before_sealing: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(daemon=True, name="checkpoint-keeper")
        self.root, self.run_name, self.keep, self.before_sealing = root, run, keep, before_sealing
        self.problem: str | None = None  # the first checkpoint that could not be sealed, as a sentence
        self._saved: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._tail = b""

    def watch(self, written: bytes) -> None:
        """Look through what has just been written to the log."""
        text = self._tail + written
        end = 0
        for match in _SAVED.finditer(text):
            self._saved.put(int(match[1]))
            end = match.end()
        self._tail = text[max(end, len(text) - _LONGEST_PHRASE) :]

    def finish(self) -> None:
        """Seal what has been reported so far and end; call it once the log is closed."""
        self._saved.put(None)
        self.join()

    def run(self) -> None:
        while (iteration := self._saved.get()) is not None:
            checkpoint = Checkpoint(iteration, self.root / f"iter_{iteration:07d}")
            try:
                self.before_sealing()
                checkpoints.seal(checkpoint, self.run_name)
                if self.keep is not None:
                    checkpoints.prune(self.root, self.keep)
            except OSError as error:
                self.problem = self.problem or (
                    f"The checkpoint of step {iteration} in {self.root} could not be sealed "
                    f"({error.strerror or error}), so a resumed run will not use it."
                )
