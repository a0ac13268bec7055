"""Break a run on purpose, again and again, and see whether anything is lost: the fault matrix.

    python -m megatron_ce_adaptor.longrun.faults --config configs/cpu_small.yaml --nproc 2 --out runs/faults

One run goes through without a fault.  A second one is killed, or a checkpoint of it is damaged, at random
steps; after each fault it is started again with ``--resume``.  At the end both must have printed the same
losses and gradient norms at every step, to the last digit, and hold the same weights, bit for bit.

Exit status: 0 nothing was lost, 1 something was (the table says what), 2 bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_ce_adaptor.longrun import checkpoints, processes
from megatron_ce_adaptor.longrun.files import strict_json, write_atomically
from megatron_ce_adaptor.longrun.megatron_log import LogError, parse_log
from megatron_ce_adaptor.longrun.resume import FOLDER

LOST_NOTHING, LOST, BAD_ARGUMENTS = 0, 1, 2
FAILED, KILLED = 1, -signal.SIGKILL  # how a launcher ends: that notices the fault, that is hit itself

_STEP = re.compile(rb"iteration\s+(\d+)/")
_CONTINUING = re.compile(r"Continuing from the checkpoint of step (\d+)")
_START_SECONDS = 300.0  # until the first step, on a machine that others use
_END_SECONDS = 120.0  # until everything has ended after a fault


@dataclass
class Injection:
    """One fault and what came of it."""

    number: int
    fault: str
    at_step: int  # the last one printed before it
    expected: int = FAILED  # exit status of the launcher
    exit_code: int | None = None  # None: it did not end
    seconds: float = 0.0  # from the fault until no process was left
    left: int = 0  # processes that had to be killed after that
    resumed_from: int | None = None  # 0: from the beginning
    refused: list[str] = field(default_factory=list)  # what the next start said of checkpoints it did not use


class Start:
    """One start of the launcher, its output in a file."""

    def __init__(
        self, command: list[str], folder: Path, output: Path, largest_file: int | None = None
    ) -> None:
        def limit_files() -> None:
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        self.folder, self.output = folder, output
        with output.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=limit_files,
            )

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def last_step(self) -> int:
        """The last step it has printed, 0 before the first."""
        found = _STEP.findall(self.output.read_bytes())
        return int(found[-1]) if found else 0

    def wait_for_steps(self, number: int) -> bool:
        """Wait until it has printed so many steps; False if it ended before."""
        deadline = time.monotonic() + _START_SECONDS
        while len(_STEP.findall(self.output.read_bytes())) < number:
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {number} within {_START_SECONDS:.0f} s; see {self.output}")
            time.sleep(0.05)
        return True

    def everyone(self) -> list[int]:
        return [self.process.pid, *processes.descendants(self.process.pid)]

    def wait_for_end(self, injection: Injection, everyone: list[int]) -> None:
        """Wait until nothing of it runs, and note how it ended; what still runs is killed."""
        began = time.monotonic()
        while time.monotonic() - began < _END_SECONDS:
            injection.exit_code = self.process.poll()
            if injection.exit_code is not None and not self._still_running(everyone):
                break
            time.sleep(0.05)
        injection.seconds = round(time.monotonic() - began, 1)
        running = self._still_running(everyone)
        injection.left = len(running)
        processes.end_all(running, grace=0)
        self.process.wait()

    def _still_running(self, everyone: list[int]) -> list[int]:
        # A process that was started after `everyone` was listed is known by its environment.
        known = {pid for pid in everyone if processes.is_running(pid)}
        return sorted(known.union(processes.with_variable("OUT_DIR", str(self.folder))))


# --- the faults ------------------------------------------------------------------------------------------


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_a_rank(start: Start, chance: random.Random) -> None:
    """SIGKILL to one rank."""
    ranks: dict[int, int] = {}
    for pid in start.everyone():  # parents first: a rank's helpers bear its name
        number = processes.rank_of(pid)
        if number is not None:
            ranks.setdefault(number, pid)
    _kill([chance.choice(list(ranks.values()))])


def kill_the_launcher(start: Start, chance: random.Random) -> None:
    """SIGKILL to the launcher."""
    _kill([start.process.pid])


def kill_everything(start: Start, chance: random.Random) -> None:
    """SIGKILL to every process."""
    _kill(start.everyone())


def _newest(root: Path) -> checkpoints.Checkpoint:
    sealed = [c for c in checkpoints.checkpoints_in(root) if c.is_sealed]
    if not sealed:
        raise FileNotFoundError(f"there is no checkpoint in {root} yet")
    return sealed[-1]


def _largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size)


def cut_in_half(root: Path) -> None:
    """The largest file of the newest checkpoint cut in half."""
    path = _largest(_newest(root).folder)
    os.truncate(path, path.stat().st_size // 2)


def lose_a_file(root: Path) -> None:
    """A file of the newest checkpoint removed."""
    _largest(_newest(root).folder).unlink()


def flip_a_bit(root: Path) -> None:
    """One bit of the newest checkpoint flipped."""
    path = _largest(_newest(root).folder)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def stale_tracker(root: Path) -> None:
    """Megatron's tracker file names a checkpoint that is not there."""
    (root / checkpoints.TRACKER).write_text("7777777")


def leave_unfinished(root: Path) -> None:
    """A newer checkpoint that was never finished."""
    newest = _newest(root)
    copy = newest.folder.with_name(f"iter_{newest.iteration + 1:07d}")
    shutil.copytree(newest.folder, copy, ignore=shutil.ignore_patterns(checkpoints.SEAL, "metadata.json"))
    (root / checkpoints.TRACKER).write_text(str(newest.iteration + 1))


KILLS: tuple[Callable[[Start, random.Random], None], ...] = (kill_a_rank, kill_the_launcher, kill_everything)
DAMAGES = (cut_in_half, lose_a_file, stale_tracker, leave_unfinished, flip_a_bit)


def _name(fault: Callable[..., None]) -> str:
    return (fault.__doc__ or "").strip().rstrip(".")


# --- the matrix ------------------------------------------------------------------------------------------


def _command(args: argparse.Namespace, out: Path, resumes: bool) -> list[str]:
    command = [sys.executable, "-m", "megatron_ce_adaptor.cli", "pretrain", "--config", str(args.config)]
    command += ["--impl", args.impl, "--steps", str(args.steps), "--nproc", str(args.nproc)]
    command += ["--save-every", str(args.save_every), "--out", str(out)]
    return [*command, "--resume"] if resumes else command


def _note_start(injection: Injection | None, start: Start, root: Path) -> None:
    """Note from where a start went on after `injection`, and what it refused."""
    if injection is None:
        return
    text = start.text()
    found = _CONTINUING.search(text)
    injection.resumed_from = int(found[1]) if found else 0
    sentence = rf"The checkpoint of step \d+ in {re.escape(str(root))} (.+)\.$"
    injection.refused = re.findall(sentence, text, re.MULTILINE)


def break_and_resume(args: argparse.Namespace, folder: Path) -> list[Injection]:
    """Train in `folder`, with args.kills faults on the way; returns them. The run is complete afterwards.

    Raises:
        RuntimeError: the last start, without a fault, did not complete the run.
    """
    chance = random.Random(args.seed)
    root = folder / FOLDER / args.impl
    done: list[Injection] = []
    starts = 0
    while True:
        output = folder.with_name(f"{folder.name}.start{starts:02d}.txt")
        is_last = len(done) >= args.kills
        full_disk = not is_last and len(done) == args.full_disk_at
        limit = args.largest_file if full_disk else None
        start = Start(_command(args, folder, starts > 0), folder, output, limit)
        starts += 1
        # Every fifth kill comes before the first step, where a start reads its checkpoint.
        steps = 0 if len(done) % 5 == 4 else chance.randint(1, 2 * args.save_every)
        if is_last or full_disk:
            everyone = start.everyone()
            injection = Injection(len(done) + 1, "Full disk: a file may not grow", start.last_step())
            while start.process.poll() is None:
                everyone = list({*everyone, *start.everyone()})
                time.sleep(0.2)
            injection.at_step = start.last_step()
            start.wait_for_end(injection, everyone)
            _note_start(done[-1] if done else None, start, root)
            if is_last:
                if injection.exit_code != 0:
                    raise RuntimeError(f"the last start ended with {injection.exit_code}; see {output}")
                return done
        else:
            if steps == 0:
                time.sleep(chance.uniform(0.5, args.start_seconds))
            if start.process.poll() is not None or not start.wait_for_steps(steps):
                raise RuntimeError(
                    f"start {starts} ended with {start.process.wait()} before its fault; see {output}, and "
                    "give more --steps if the run came to its end"
                )
            kill = KILLS[len(done) % len(KILLS)]
            injection = Injection(len(done) + 1, _name(kill), start.last_step())
            everyone = start.everyone()
            try:
                kill(start, chance)
            except IndexError:  # no rank yet
                kill_everything(start, chance)
                injection.fault, kill = _name(kill_everything), kill_everything
            injection.expected = FAILED if kill is kill_a_rank else KILLED
            start.wait_for_end(injection, everyone)
            _note_start(done[-1] if done else None, start, root)
            if steps == 0:
                injection.fault += ", while starting"
            damage = DAMAGES[len(done) // 2 % len(DAMAGES)]
            if len(done) % 2 and len([c for c in checkpoints.checkpoints_in(root) if c.is_sealed]) > 1:
                damage(root)
                injection.fault += "; " + _name(damage)[0].lower() + _name(damage)[1:]
        done.append(injection)
        print(f"{injection.number:3d} step {injection.at_step:5d}: {injection.fault}", flush=True)


def differences(reference: Path, broken: Path, impl: str) -> list[str]:
    """What the broken run has otherwise than the reference, one sentence each; none if nothing was lost."""
    try:
        a, b = (parse_log(folder / f"{impl}.log") for folder in (reference, broken))
    except LogError as error:
        return [str(error)]
    found = []
    if a.steps.keys() != b.steps.keys():
        found.append(f"steps {sorted(a.steps.keys() ^ b.steps.keys())[:5]} are in one log only")
    for step in sorted(a.steps.keys() & b.steps.keys()):
        ours, theirs = a.steps[step], b.steps[step]
        for what in ("lm_loss", "grad_norm", "learning_rate"):
            if getattr(ours, what) != getattr(theirs, what):
                found.append(f"{what} of step {step}: {getattr(ours, what)} and {getattr(theirs, what)}")
    for rank, calls in a.calls.items():
        others = b.calls.get(rank)
        if others is None or (others.te, others.native) < (calls.te, calls.native):
            found.append(f"rank {rank} counted {calls} in the reference and {others}")
    first, second = (checkpoints.newest_whole(folder / FOLDER / impl)[0] for folder in (reference, broken))
    if first is None or second is None:
        found.append("a last checkpoint is missing")
    else:
        found += [f"the weights {name} differ" for name in differing_weights(first.folder, second.folder)]
    return found


def differing_weights(first: Path, second: Path) -> list[str]:
    """Names of the model's tensors that two checkpoints do not hold bit for bit alike.

    The optimizer's tensors have uninitialised padding; a difference in them reaches the weights.
    """
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        reader = dcp.FileSystemReader(folder)
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(("optimizer.", "chained_"))
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    a, b = weights(first), weights(second)
    names = sorted(a.keys() | b.keys())
    return (
        [n for n in names if n not in a or n not in b or not torch.equal(a[n], b[n])] if names else ["(none)"]
    )


def table(injections: list[Injection]) -> str:
    """The faults as a Markdown table."""
    rows = [
        "| # | at step | injected | status | s | went on from | checkpoint refused, because it |",
        "|---|---|---|---|---|---|---|",
    ]
    for i in injections:
        code = "none" if i.exit_code is None else str(i.exit_code)
        refused = "; ".join(re.sub(r"(\S+\.distcp)", r"`\1`", sentence) for sentence in i.refused) or "-"
        cells = (i.number, i.at_step, i.fault, code, f"{i.seconds:.0f}", i.resumed_from, refused)
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--impl", default="te", choices=("native", "te"))
    parser.add_argument("--nproc", type=int, default=2, help="processes, default %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="default %(default)s")
    parser.add_argument("--save-every", type=int, default=5, help="default %(default)s")
    parser.add_argument("--kills", type=int, default=20, help="faults, default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of what is hit, and when")
    parser.add_argument("--start-seconds", type=float, default=15, help="within which a start may be hit")
    parser.add_argument("--full-disk-at", type=int, help="let this start, from 0, run with a limit on files")
    parser.add_argument("--largest-file", type=int, default=2**21, help="bytes of that limit")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="default %(default)s")
    return parser.parse_args()


def main() -> int:
    """Entry point; returns the exit status."""
    args = _arguments()
    if args.out.exists() and any(args.out.iterdir()):
        print(f"faults: {args.out} is not empty; name another folder with --out.", file=sys.stderr)
        return BAD_ARGUMENTS
    args.out.mkdir(parents=True, exist_ok=True)
    reference, broken = args.out / "reference", args.out / "broken"
    first = Start(_command(args, reference, False), reference, args.out / "reference.txt")
    if first.process.wait() != 0:
        print(f"faults: the run without faults failed; see {first.output}.", file=sys.stderr)
        return LOST
    try:
        injections = break_and_resume(args, broken)
    except (RuntimeError, TimeoutError) as error:
        print(f"faults: {error}.", file=sys.stderr)
        return LOST
    lost = differences(reference, broken, args.impl)
    lost += [f"fault {i.number} left {i.left} processes" for i in injections if i.left]
    lost += [
        f"fault {i.number} ended the launcher with {i.exit_code}, not {i.expected}"
        for i in injections
        if i.exit_code != i.expected
    ]
    result = {"injections": [asdict(i) for i in injections], "lost": lost}
    write_atomically(args.out / "faults.json", strict_json(result))
    print(table(injections))
    print("\n".join(lost) if lost else f"Nothing was lost: {args.steps} steps, {len(injections)} faults.")
    return LOST if lost else LOST_NOTHING


if __name__ == "__main__":
    sys.exit(main())
