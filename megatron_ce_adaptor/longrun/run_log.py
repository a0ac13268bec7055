"""The log of a run while it is written: one launch at a time, continued by a resumed one, never cut.

``<name>.log.partial`` becomes ``<name>.log`` when the run is complete, else ``<name>.failed.log``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_ce_adaptor.longrun.preflight import Refused

VERDICT_FILES = ("metrics.json", "report.html", "report.png", "acceptance.md", "acceptance.zh-CN.md")
GATES_FILE = "gates.yaml"  # the limits of that verdict, where they were not the defaults
_TAIL_BYTES = 1 << 16


def _places(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """Where a run's log can be: as it is written, after a bad end, after a good one."""
    return folder / f"{name}.log.partial", folder / f"{name}.failed.log", folder / f"{name}.log"


def has_earlier(folder: Path, name: str) -> bool:
    """Whether an earlier start of the run `name` left a log."""
    return any(path.is_file() and path.stat().st_size > 0 for path in _places(folder, name))


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[BinaryIO]:
    """Open ``<name>.log.partial`` for this launch alone. Raises Refused.

    The lock lasts until every process that inherited the open file has ended.
    """
    partial = _places(folder, name)[0]
    try:
        log = partial.open("ab")
    except OSError as error:
        raise Refused(f"{partial} cannot be written: {error.strerror or error}.") from error
    with log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One that ended between our opening and our locking has renamed the file.
            is_free = os.path.samestat(os.fstat(log.fileno()), partial.stat())
        except OSError:
            is_free = False
        if not is_free:
            raise Refused(
                f"Another launch, or what is left of one, is writing {partial}: wait for its end or give "
                "another --out."
            )
        yield log


def begin(folder: Path, name: str, log: BinaryIO, resumes: bool = False) -> None:
    """Begin the log of a run: an earlier log, its verdict and limits make way. Raises Refused.

    A run that `resumes` goes on in its earlier log instead.
    """
    try:
        if resumes:
            _continue(folder, name, log)
        else:
            _begin_anew(folder, name, log)
        for judgement in VERDICT_FILES:  # it was passed on the earlier log
            (folder / judgement).unlink(missing_ok=True)
        _put_aside(folder / GATES_FILE)
    except OSError as error:
        raise Refused(
            f"The log of {name} in {folder} cannot be begun: {error.strerror or error}; what earlier starts "
            "left is still there."
        ) from error


def _begin_anew(folder: Path, name: str, log: BinaryIO) -> None:
    _, failed, complete = _places(folder, name)
    failed.unlink(missing_ok=True)  # first: a resumed run would take it for its own
    log.truncate(0)
    if name == "native" and any((folder / f"native.log{packed}").exists() for packed in ("", ".gz")):
        # The noise floor is a distance from that earlier run. After a rerun of te alone it still holds.
        for packed in ("", ".gz"):
            _put_aside(folder / f"noise_floor.log{packed}")
        (folder / "noise_floor.status.json").unlink(missing_ok=True)
    _put_aside(complete)


def _continue(folder: Path, name: str, log: BinaryIO) -> None:
    """Put what the earlier starts of this run printed at the beginning of `log`, if it is not there."""
    earlier = [path for path in _places(folder, name)[1:] if path.is_file()]
    # They are removed once they are copied whole: while one is there, `log` holds at most a part of it.
    if earlier and os.fstat(log.fileno()).st_size <= earlier[0].stat().st_size:
        log.truncate(0)
        with earlier[0].open("rb") as source:
            shutil.copyfileobj(source, log)
        log.flush()
        os.fsync(log.fileno())
    for path in earlier:
        path.unlink()
    if os.fstat(log.fileno()).st_size:
        log.write(b"\n")  # the last line may have been cut
        log.flush()


def _put_aside(file: Path) -> None:
    """Rename ``a.b`` to ``a.previous.b``, over an earlier one, if it exists."""
    stem, _, suffix = file.name.partition(".")
    with contextlib.suppress(FileNotFoundError):
        file.replace(file.with_name(f"{stem}.previous.{suffix}"))


def tail(log: Path, begin: int) -> str:
    """The end of `log`, at most 64 KiB, without what stands before the byte `begin`."""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


class Tee(threading.Thread):
    """Copies what the ranks print to the terminal and to the log, byte for byte, as it comes."""

    def __init__(self, source: BinaryIO, log: BinaryIO, watch: Callable[[bytes], None] | None = None) -> None:
        super().__init__(daemon=True, name="tee")
        self.source = source
        self.log: BinaryIO = log
        self.watch = watch  # called with what has been written to the log
        self.log_error: OSError | None = None

    def run(self) -> None:
        terminal: BinaryIO | None = getattr(sys.stdout, "buffer", None)
        # After an error the pipe is still emptied: ranks that cannot print would hang instead of ending.
        while chunk := os.read(self.source.fileno(), 1 << 16):
            if self.log_error is None:
                try:
                    self.log.write(chunk)
                    self.log.flush()
                    if self.watch is not None:
                        self.watch(chunk)
                except OSError as error:
                    self.log_error = error
            if terminal is not None:
                try:
                    terminal.write(chunk)
                    terminal.flush()
                except (OSError, ValueError):  # the reader, such as `head`, has gone; the run goes on
                    terminal = None
