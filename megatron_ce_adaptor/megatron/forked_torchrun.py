"""torchrun for many ranks on few CPU cores: import torch and Megatron once, then fork the ranks.

    python -m megatron_ce_adaptor.megatron.forked_torchrun <torchrun options> \\
        -m megatron_ce_adaptor.megatron.pretrain <Megatron's own arguments>

Takes torchrun's command line and is torchrun in all else (rendezvous, several machines, ending the other
ranks when one fails).  torchrun starts every rank as a new interpreter, and importing torch and Megatron
takes each of them more than ten seconds of a core: with eight ranks on two cores, most of a minute.  Here the
agent imports them, and its ranks are forks of it (torchelastic's start method "fork").

For the CPU only: a forked process cannot use a CUDA context.  Exit status: 0, 1 if a rank failed, 2 if the
command line or the environment cannot work.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing.util
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

# Before torch is imported: with OpenMP threads in the agent, its forks could hang.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_ce_adaptor.megatron import pretrain

_ENTRY = "megatron_ce_adaptor.megatron.pretrain"
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


# What Megatron imports while it starts or at its first step, and how long that takes counts most.
_IMPORTED_LATE = ("megatron.core.tokenizers.text", "torch._dynamo", "torch.utils.tensorboard")


def _preload() -> None:
    """Import what every rank would import later, where this version of Megatron has it."""
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def _name_process(name: str) -> None:
    """Make this process show as `name` in ps: forks share their command line, and look alike without."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _end_with_parent(parent: int | None) -> None:
    """Let the kernel kill this process when its parent ends; at once, if it is no longer `parent`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _end_helpers_with_rank() -> None:
    """Let what a rank forks, such as the writers of a checkpoint, end with it: nobody else would end them.

    The kernel looks at the thread that forked, so only forks of the main thread, which lives as long.
    """
    by_main_thread, parent = False, 0

    def before() -> None:
        nonlocal by_main_thread, parent
        by_main_thread, parent = threading.current_thread() is threading.main_thread(), os.getpid()

    def after_in_child() -> None:
        if by_main_thread:
            _end_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=after_in_child)

    start = multiprocessing.util.spawnv_passfds  # how the start method "spawn" begins a new interpreter

    def start_that_ends_with_us(path: Any, args: Any, passfds: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            return start(path, args, passfds)
        tied = (
            f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0); "
        )
        words = [tied + w if str(w).startswith("from multiprocessing.spawn import") else w for w in args]
        return start(path, words, passfds)

    multiprocessing.util.spawnv_passfds = start_that_ends_with_us


def _run_rank(train: Callable[[], None], agent: int | None = None) -> None:
    # The agent's exit handlers are not this process's to run, and multiprocessing ends a fork without running
    # those that training registers (the call counts, among others), so run exactly these.
    atexit._clear()
    # Nor are its signal handlers, which would wait for a blocked collective to return.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    _name_process(f"mce-rank-{os.environ['RANK']}")
    _end_with_parent(agent)  # an agent that was killed ends nobody
    _end_helpers_with_rank()
    try:
        train()
    except SystemExit as leaving:
        # Megatron's way to stop early. A process that leaves this way hands the agent no return value, and
        # the agent waits for one for ever, unless the exit status says that it failed.
        if leaving.code not in (None, 0):
            raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _parse(argv: Sequence[str]) -> Any:
    from torch.distributed import run as torchrun

    options = torchrun.parse_args(list(argv))
    if not options.module or options.training_script != _ENTRY:
        raise pretrain.UsageError(
            f"forked ranks run {_ENTRY} only: give -m {_ENTRY} after torchrun's options, or use torchrun."
        )
    if options.standalone:
        options.rdzv_backend = "c10d"
        options.rdzv_endpoint = "localhost:0"
        options.rdzv_id = str(uuid.uuid4())
    options.start_method = "fork"
    return options


def launch(argv: Sequence[str]) -> None:
    """Run torchrun's command line `argv` with forked ranks.

    Raises:
        UsageError: the command line or the environment cannot work, or the device is not the CPU.
        ChildFailedError: (torchelastic's) a rank failed, and the others were ended.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed import run as torchrun
    from torch.distributed.launcher.api import elastic_launch

    options = _parse(argv)
    device = pretrain.choose_device(os.environ.get("MCE_DEVICE"))
    if device != "cpu":
        raise pretrain.UsageError(
            f"forked ranks cannot use {device}: use torchrun, or set MCE_DEVICE=cpu to train on the CPU."
        )
    config, _, _ = torchrun.config_from_args(options)
    train = pretrain.prepare(options.training_script_args, config.max_nodes * config.nproc_per_node)
    _preload()
    try:
        elastic_launch(config=config, entrypoint=_run_rank)(train, os.getpid())
    except DistNetworkError as error:  # only the agent's own: the ranks are other processes
        raise pretrain.UsageError(
            f"the rendezvous at {config.rdzv_endpoint} failed ({error}): choose another --master-port, or "
            "check that the first machine can be reached there."
        ) from error


def main() -> None:
    """Entry point of ``python -m megatron_ce_adaptor.megatron.forked_torchrun``."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch(sys.argv[1:])
    except pretrain.UsageError as error:
        pretrain.exit_with_usage_error(error)
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # torchrun's table: which rank failed first, and how
        sys.exit(1)


if __name__ == "__main__":
    main()
