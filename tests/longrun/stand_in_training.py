"""Stands in for a training under torchrun: prints Megatron-like lines and misbehaves as STAND_IN says.

Imports no torch, so that a launch takes only as long as torchrun itself.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int, required=True)
parser.add_argument("--save", type=Path)
parser.add_argument("--save-interval", type=int)
parser.add_argument("--load", type=Path)
arguments = parser.parse_known_args()[0]
steps = arguments.train_iters
loaded = int((arguments.load / "latest_checkpointed_iteration.txt").read_text()) if arguments.load else 0
rank = int(os.environ["RANK"])
behaviour = os.environ.get("STAND_IN", "train")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def train(first: int, last: int) -> None:
    if rank != int(os.environ["WORLD_SIZE"]) - 1:
        return
    for step in range(first, last + 1):
        say(
            f" [2026-01-01 00:00:00.000000] iteration {step:8d}/{steps:8d} | consumed samples: {step * 4} | "
            f"elapsed time per iteration (ms): 10.0 | learning rate: 1.0E-03 | global batch size: 4 | "
            f"lm loss: {9 - step / 100:.6E} | loss scale: 1.0 | grad norm: 1.000 | "
            "number of skipped iterations: 0 | number of nan iterations: 0 |"
        )
        if arguments.save and step % arguments.save_interval == 0:
            save(step)


def save(step: int) -> None:
    folder = arguments.save / f"iter_{step:07d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(str(step))
    (arguments.save / "latest_checkpointed_iteration.txt").write_text(str(step))
    say(
        f"  [2026-01-01 00:00:00.0] successfully saved checkpoint from iteration {step:7d} to {folder.parent}"
    )


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


say(f"stand-in rank {rank} pid {os.getpid()} says {behaviour}")
if behaviour == "train":
    train(loaded + 1, steps)
elif behaviour == "short":  # exits well, but early
    train(1, steps // 2)
elif behaviour == "exit_interval":  # the same, and says so as Megatron does
    train(1, steps // 2)
    say(f"[exiting program at iteration {steps // 2}] datetime: 2026-01-01 00:00:00.000000 ")
elif behaviour == "fail" and rank == 1:
    sys.exit(7)
elif behaviour == "leave" and rank == 1:  # exits with 0 while the others wait for it
    sys.exit(0)
elif behaviour == "fill":
    while True:
        say("x" * 65535)
else:
    if behaviour == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:  # a helper process, as data loaders and checkpoint writers are
            say(f"stand-in helper pid {os.getpid()}")
            sleep_for_ever()
    train(1, 1)
    sleep_for_ever()
