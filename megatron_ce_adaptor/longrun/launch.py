"""``megatron-ce pretrain``: check, start one training run under torchrun, watch it, leave a record of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from megatron_ce_adaptor.longrun import checkpoints, environment, preflight, processes, resume, run_log
from megatron_ce_adaptor.longrun.checkpoint_keeper import CheckpointKeeper
from megatron_ce_adaptor.longrun.config import (
    DEVICES,
    IMPLEMENTATIONS,
    ConfigError,
    Layout,
    RunConfig,
    load_config,
)
from megatron_ce_adaptor.longrun.files import strict_json, write_atomically
from megatron_ce_adaptor.longrun.megatron_log import LogError, TrainingLog, parse_log
from megatron_ce_adaptor.longrun.preflight import Refused
from megatron_ce_adaptor.longrun.run_log import Tee
from megatron_ce_adaptor.longrun.run_record import LaunchStatus, write_commands

COMPLETE, FAILED, REFUSED = 0, 1, 2

TRAINING_MODULE = "megatron_ce_adaptor.megatron.pretrain"
TORCHRUN = "torch.distributed.run"
# On the CPU the ranks are forked from one process that has imported Megatron: seconds instead of a minute.
FORKED_TORCHRUN = "megatron_ce_adaptor.megatron.forked_torchrun"

# torchrun gives the other ranks 30 s to follow a failed one, then kills them; after that it is our turn.
RANK_LOSS_SECONDS = 40.0
STOP_GRACE_SECONDS = 10.0
NOISE_FLOOR = "noise_floor"  # the run's name, which the comparison looks for
RESERVED_BYTES = 2**18
LEAST_FREE_WHILE_RUNNING = 8 * 2**20  # bytes: room to finish the log and write the record

EPILOG = """\
exit status:
  0      the run is complete: training ended well and the log reaches the last step
  1      the training failed or was stopped; DIR/NAME.failed.log and DIR/NAME.status.json say how far it came
  2      refused before the start: configuration, process count, data, port or output folder
  128+N  stopped by signal N

checkpoints:
  --save-every N keeps the two newest in DIR/checkpoints/NAME (or in the configuration's --save). The same
  command with --resume continues from the newest one that is whole, or says that the run is complete; its log
  goes on where it ended. A checkpoint that was not finished or is damaged is named and not used.

environment:
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several machines; on one, a free port is taken
  NPUS_PER_NODE                                 processes on this machine, if --nproc is not given
  MEGATRON_PATH                                 a Megatron-LM checkout whose pretrain_gpt.py is run
  DRY_RUN=1                                     the same as --dry-run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``megatron-ce pretrain``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--config", required=True, help="the run, such as configs/cpu_small.yaml")
    parser.add_argument("--impl", required=True, choices=IMPLEMENTATIONS, help="which cross entropy trains")
    parser.add_argument(
        "--noise-floor",
        action="store_true",
        help="with --impl native: the control run, whose first logits are changed by one ulp",
    )
    parser.add_argument("--steps", type=int, help="steps to train instead of the configuration's")
    parser.add_argument("--nproc", type=int, help="processes on this machine; default NPUS_PER_NODE or 8")
    parser.add_argument("--out", type=Path, help="folder for log and records; default runs/<configuration>")
    parser.add_argument("--name", help="what the run's files are called in --out; default the implementation")
    parser.add_argument("--save-every", type=int, metavar="N", help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue a run that did not come to its end")
    parser.add_argument(
        "--device", choices=DEVICES, help="default MCE_DEVICE, then the configuration's DEVICE"
    )
    parser.add_argument(
        "--entry",
        default=TRAINING_MODULE,
        metavar="MODULE|FILE.py",
        help="what torchrun runs with Megatron's arguments; default %(default)s",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print environment and torchrun line, start nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out ``megatron-ce pretrain`` for the parsed arguments; returns the exit status, see EPILOG."""
    try:
        plan = make_plan(args, os.environ)
        if args.dry_run or os.environ.get("DRY_RUN", "0") not in ("", "0"):
            print(plan.as_shell())
            return COMPLETE
        if plan.resumes and resume.is_complete(plan.folder, plan.name, plan.steps):
            print(f"megatron-ce pretrain: {plan.folder}/{plan.name}.log is complete: {plan.steps} steps.")
            return COMPLETE
        device = plan.added_environment.get("MCE_DEVICE", "")
        preflight.check_megatron_path(plan.variables)
        preflight.check_device(
            device, plan.config, plan.processes, {**plan.variables, **plan.added_environment}
        )
        preflight.check_data(plan.config, plan.variables)
        resume.check_load(plan.config, plan.variables)
        preflight.check_port(plan.machines)
        preflight.check_output_folder(plan.folder)
        with run_log.locked(plan.folder, plan.name) as log:
            plan = _with_start(plan)
            run_log.begin(plan.folder, plan.name, log, plan.resumes)
            return _train(plan, log)
    except (ConfigError, Refused) as error:
        _complain(str(error))
        return REFUSED


@dataclass(frozen=True)
class Plan:
    """One launch, decided: what to start, with which environment, and where its record goes."""

    name: str  # of the files: <name>.log, <name>.status.json
    implementation: str
    config: RunConfig
    layout: Layout
    machines: preflight.Machines
    processes: int  # on this machine
    folder: Path
    torchrun: str  # the module
    entry: list[str]  # torchrun's words for what it runs
    variables: Mapping[str, str]  # the caller's environment and OUT_DIR: what references are replaced from
    exports: dict[str, str]  # what the launcher adds beside ENV_VARS
    checkpoints: Path | None = None  # where Megatron saves, None if it does not
    keep: int | None = None  # how many checkpoints stay, None for all
    resumes: bool = False
    load: bool = False  # a checkpoint was found to continue from

    @property
    def sealed_as(self) -> str:
        """What the seals of this run's checkpoints say."""
        return NOISE_FLOOR if "MCE_NOISE_FLOOR" in self.exports else self.implementation

    @property
    def steps(self) -> int:
        return self.config.integer("--train-iters", 0, self.variables)

    @property
    def holds_last_rank(self) -> bool:
        """Whether this machine runs the rank that prints Megatron's iteration lines."""
        return self.machines.node_rank == self.machines.nodes - 1

    @property
    def added_environment(self) -> dict[str, str]:
        return {**self.exports, **self.config.environment_values(self.variables)}

    @property
    def command(self) -> list[str]:
        machines = self.machines
        return [
            *(sys.executable, "-m", self.torchrun),
            *("--nproc-per-node", str(self.processes)),
            *("--nnodes", str(machines.nodes), "--node-rank", str(machines.node_rank)),
            *("--master-addr", machines.address, "--master-port", str(machines.port)),
            *self.entry,
            *self.config.argument_vector(self.variables),
            *(("--load", str(self.checkpoints)) if self.load else ()),
        ]

    def as_shell(self) -> str:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.added_environment.items()]
        return "\n".join([*exports, shlex.join(self.command)])


def make_plan(args: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Decide the launch, creating and starting nothing. Raises ConfigError or Refused."""
    config = load_config(args.config).with_overrides(args.impl, args.steps)
    if not config.is_set("--train-iters"):
        raise ConfigError(
            f"{config.path}, MODEL_ARGS: --train-iters is missing; give it there or use --steps."
        )
    if args.noise_floor and args.impl != "native":
        raise Refused(f"--noise-floor is a run of native against itself: use --impl native, not {args.impl}.")
    if environ.get("MCE_NOISE_FLOOR", "0") not in ("", "0") and not args.noise_floor:
        raise Refused(
            "MCE_NOISE_FLOOR is set, which would disturb this run's first logits: unset it, or use "
            "--noise-floor."
        )
    name = args.name if args.name is not None else NOISE_FLOOR if args.noise_floor else args.impl
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise Refused(f"--name {name!r} cannot name files: use letters, digits and underscores.")
    folder = args.out if args.out is not None else Path("runs") / config.name
    variables = {**environ, "OUT_DIR": str(folder)}
    exports = {"OUT_DIR": str(folder)}
    if args.noise_floor:
        exports["MCE_NOISE_FLOOR"] = "1"
    device = (
        args.device or config.environment_values(variables).get("MCE_DEVICE") or environ.get("MCE_DEVICE")
    )
    device = device or config.device
    if args.device:  # asked for here, so the file's own choice gives way
        config = replace(config, environment={**config.environment, "MCE_DEVICE": args.device})
    elif device:
        exports["MCE_DEVICE"] = device
    machines = preflight.machines_from(environ)
    count = args.nproc
    if count is None:
        text = environ.get("NPUS_PER_NODE") or "8"
        if not text.isdecimal():
            raise Refused(f"NPUS_PER_NODE is {text!r}: expected a number of processes.")
        count = int(text)
    root = resume.checkpoint_root(config, variables, folder, name)
    config = resume.with_checkpoints(config, variables, root, args.save_every, args.resume)
    return Plan(
        name=name,
        implementation=args.impl,
        config=config,
        layout=config.layout(count * machines.nodes, variables),
        machines=machines,
        processes=count,
        folder=folder,
        torchrun=FORKED_TORCHRUN if device == "cpu" and args.entry == TRAINING_MODULE else TORCHRUN,
        entry=[args.entry] if args.entry.endswith(".py") else ["-m", args.entry],
        variables=variables,
        exports=exports,
        checkpoints=root if config.values("--save", variables) else None,
        keep=checkpoints.KEPT if args.save_every is not None else None,
        resumes=args.resume,
    )


def _with_start(plan: Plan) -> Plan:
    """Find the checkpoint to continue from, or make way for new ones. Raises Refused."""
    root = plan.checkpoints
    if root is None:
        return plan
    is_first_machine = plan.machines.node_rank == 0  # they share the checkpoints' disk
    try:
        if not plan.resumes:
            if is_first_machine:
                resume.begin_anew(root, is_ours=plan.folder.resolve() in root.resolve().parents)
            return plan
        was_started = (plan.folder / f"{plan.name}.status.json").is_file()
        iteration, sentences = resume.find(root, plan.sealed_as, was_started)
        if iteration > 0 and plan.holds_last_rank and not run_log.has_earlier(plan.folder, plan.name):
            raise Refused(
                f"{root} has a checkpoint of step {iteration}, but {plan.folder} has no {plan.name}.log with "
                "the steps before it: name the --out of the earlier start, or put its log there."
            )
        for sentence in sentences:
            _complain(sentence)
        if is_first_machine:
            resume.settle(root, iteration)
    except OSError as error:
        raise Refused(f"The checkpoints in {root} cannot be used: {error.strerror or error}.") from error
    return replace(plan, load=iteration > 0)


# --- the run ---------------------------------------------------------------------------------------------


class _Signals:
    """Holds back SIGINT, SIGTERM and SIGHUP while a run is on; remembers the first and counts them."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.count = 0
        self._before: dict[int, signal.Handlers | int | None] = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._take)  # type: ignore[assignment]
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _train(plan: Plan, log: BinaryIO) -> int:
    """Start the run, watch it to its end and record it; returns the exit status."""
    status = LaunchStatus.of_started(plan.implementation, plan.steps, plan.layout)
    folder = plan.folder
    # Room for the last words, should the run fill the disk.
    reserve = folder / f".{plan.name}.reserve"
    try:
        reserve.write_bytes(bytes(RESERVED_BYTES))
        status.write(folder, plan.name)
        write_commands(
            folder,
            plan.name,
            plan.config,
            plan.variables,
            plan.exports,
            [plan.torchrun, *plan.entry],
            plan.processes,
        )
        facts = environment.collect({**os.environ, **plan.added_environment})
        write_atomically(folder / "env.json", strict_json(facts))
    except OSError as error:
        raise Refused(f"The output folder {folder} cannot be written: {error.strerror or error}.") from error

    partial = folder / f"{plan.name}.log.partial"
    begin = os.fstat(log.fileno()).st_size  # before it stands what earlier starts printed
    with _Signals() as signals:
        code, message = _supervise(plan, log, signals)
    if code == 0 and plan.holds_last_rank:
        try:
            _check_length(parse_log(partial), plan.steps)
        except LogError as error:
            code, message = FAILED, f"torchrun ended with 0, but the log is not that of a whole run: {error}"
            if _NO_CHECKPOINT in run_log.tail(partial, begin):
                message = "Megatron found no checkpoint to load and was told to end then."
    final = folder / f"{plan.name}{'.log' if code == 0 else '.failed.log'}"
    try:
        reserve.unlink(missing_ok=True)
        partial.replace(final)
        write_atomically(folder / "env.json", strict_json(environment.with_neighbours(facts, final)))
        status.exit_code, status.complete, status.message = code, code == 0, message
        status.write(folder, plan.name)
    except OSError as error:
        _complain(f"The record of this run could not be written to {folder}: {error.strerror or error}.")
        code = code or FAILED
    if code != COMPLETE:
        _complain(f"{message} The log is {final}.")
    return code


def _check_length(log: TrainingLog, steps: int) -> None:
    """Raise LogError unless the log reaches its last line; `--exit-interval` and the like end before it."""
    last = max(log.steps)
    if last < steps // log.log_interval * log.log_interval:
        raise LogError(
            f"{log.name} ends after step {last} of {steps} steps; take --exit-interval and the like out of "
            "MODEL_ARGS, or use --steps for a shorter run."
        )


def _supervise(plan: Plan, log: BinaryIO, signals: _Signals) -> tuple[int, str]:
    """Run torchrun until it ends or must be ended; leaves no process. Returns exit status and a sentence."""
    not_ours = set(processes.descendants(os.getpid()))
    begin = os.fstat(log.fileno()).st_size
    processes.set_subreaper(True)
    child = subprocess.Popen(
        plan.command,
        env={**os.environ, **plan.added_environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=processes.end_with_parent,
        # With the log goes its lock: where this launcher is killed, a next one waits for the last rank's end.
        pass_fds=(log.fileno(),),
    )
    assert child.stdout is not None
    keeper = None
    if plan.checkpoints is not None:
        keeper = CheckpointKeeper(
            plan.checkpoints, plan.sealed_as, plan.keep, before_sealing=lambda: os.fsync(log.fileno())
        )
        keeper.start()
    tee = Tee(child.stdout, log, keeper.watch if keeper is not None else None)  # type: ignore[arg-type]
    tee.start()
    try:
        reason = _wait(child, plan, tee, signals)
    finally:
        ours = [pid for pid in processes.descendants(os.getpid()) if pid not in not_ours and pid != child.pid]
        if child.poll() is None:
            _stop(child, ours, signals)
            ours = [p for p in processes.descendants(os.getpid()) if p not in not_ours and p != child.pid]
        processes.end_all(ours, grace=0 if signals.count > 1 else 2)
        processes.set_subreaper(False)
        tee.join(timeout=10)
        child.stdout.close()
        if keeper is not None:
            keeper.finish()
            if keeper.problem is not None:
                _complain(keeper.problem)
    if signals.number is not None:
        return 128 + signals.number, f"The run was stopped by {signal.Signals(signals.number).name}."
    if reason is None and tee.log_error is not None:
        reason = _log_error(plan.folder, tee.log_error)
    if reason is not None:
        return FAILED, reason
    if child.returncode != 0:
        return FAILED, _why_torchrun_failed(child.returncode, run_log.tail(Path(log.name), begin))
    return COMPLETE, f"All {plan.steps} steps are done."


def _wait(child: subprocess.Popen[bytes], plan: Plan, tee: Tee, signals: _Signals) -> str | None:
    """Wait for the end of torchrun; returns a reason to end it early, or None."""
    folder = plan.folder
    first_rank = plan.machines.node_rank * plan.processes
    watch = processes.RankWatch(child.pid, range(first_rank, first_rank + plan.processes))
    next_look = 0.0
    while child.poll() is None:
        if signals.number is not None:
            return "stopped"
        if tee.log_error is not None:
            return _log_error(folder, tee.log_error)
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + 1
            free = shutil.disk_usage(folder).free
            if free < LEAST_FREE_WHILE_RUNNING:
                left = f"{free / 2**20:.1f} MiB are left"
                return f"The output folder {folder} is full: {left}, so the run was stopped."
            missing = watch.look()
            if missing > RANK_LOSS_SECONDS:
                return (
                    f"Rank {watch.lost_rank} ended and the others did not within {RANK_LOSS_SECONDS:.0f} s, "
                    "so the run was stopped."
                )
        time.sleep(0.1)
    return None


def _stop(child: subprocess.Popen[bytes], below: list[int], signals: _Signals) -> None:
    """Hand the signal on to torchrun, which ends its ranks; then end the rest. A second signal hurries."""
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signals.number or signal.SIGTERM)
    deadline = time.monotonic() + STOP_GRACE_SECONDS
    first = signals.count
    while child.poll() is None and time.monotonic() < deadline and signals.count <= max(first, 1):
        time.sleep(0.05)
    if child.poll() is None:
        child.kill()
        processes.end_all(below, grace=0)
    child.wait()


def _log_error(folder: Path, error: OSError) -> str:
    return f"The log in {folder} cannot be written: {error.strerror or error}; the run was stopped."


_NO_CHECKPOINT = "'--exit-on-missing-checkpoint' set ... exiting"


_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(?P<rank>\d+).*?exitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL)


def _why_torchrun_failed(code: int, tail: str) -> str:
    """A sentence about the first failed rank, from the report at the end of what this start printed."""
    match = _ROOT_CAUSE.search(tail)
    last = re.search(r"^megatron_ce_adaptor: (.+)$", tail, re.MULTILINE)  # a refusal of the entry itself
    full = next((words for words in resume.FULL_DISK if words in tail), None)
    if full is not None:
        return (
            f"The training failed: {full}, most likely while it saved a checkpoint; earlier ones are whole."
        )
    if match is None:
        return f"The training failed: torchrun ended with {code}." + (f" {last[1]}" if last else "")
    rank, exit_code = match["rank"], int(match["code"])
    how = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with {exit_code}"
    return f"The training failed: rank {rank} {how}."


def _complain(sentence: str) -> None:
    sys.stdout.flush()
    print(f"megatron-ce pretrain: {sentence}", file=sys.stderr, flush=True)
