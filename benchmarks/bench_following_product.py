#!/usr/bin/env python3
"""Whether backward's hint to the L2 cache costs the matrix products that follow it anything, on one GPU.

    python benchmarks/bench_following_product.py [--rounds 60]

Backward (in place) of bf16 logits, the two products that an output layer does next (gradients of the hidden
states and of the weight) and one more small product, each between CUDA events; with the hint and without it
alternated. Prints medians, and the median of the paired differences.

Exit status: 0 measured, 2 no GPU or bad arguments.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch

from megatron_ce_adaptor import parallel_cross_entropy, plan
from megatron_ce_adaptor.implementations import cuda

STEPS = ("backward", "hidden gradient", "weight gradient", "4096 x 4096 x 4096")
SIZES = ((8192, 128256, 4096), (8192, 32000, 1024))  # rows, columns, hidden
_NEVER = 2**60
_SLEEP_CYCLES = 4_000_000


class Step:
    """Backward of the loss and the products after it, for one size."""

    def __init__(self, rows: int, columns: int, hidden: int) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.hidden, self.weight = normal(rows, hidden), normal(columns, hidden) * 0.01
        self.logits = self.hidden @ self.weight.t()
        self.target = torch.randint(0, columns, (rows,), device="cuda")
        self.upstream = torch.rand(rows, device="cuda")
        self.small = normal(4096, 4096)

    def times_ms(self, hint: bool) -> list[float]:
        kept = cuda._KEEP_FROM_CACHES
        cuda._KEEP_FROM_CACHES = kept if hint else _NEVER
        plan._plans.clear()  # the launch is decided once for calls that are alike
        try:
            logits = self.logits.clone().requires_grad_() * 1
            loss = parallel_cross_entropy(logits, self.target, overwrite_input=True)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(STEPS) + 1)]
            torch.cuda._sleep(_SLEEP_CYCLES)  # the host is through before the GPU begins
            events[0].record()
            (gradient,) = torch.autograd.grad(loss, logits, self.upstream)
            events[1].record()
            gradient @ self.weight
            events[2].record()
            gradient.t() @ self.hidden
            events[3].record()
            self.small @ self.small
            events[4].record()
            torch.cuda.synchronize()
        finally:
            cuda._KEEP_FROM_CACHES = kept
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected at least 1")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    for size in SIZES:
        step = Step(*size)
        times: dict[bool, list[list[float]]] = {True: [], False: []}
        for number in range(-3, options.rounds):  # the first three warm up
            for hint in (True, False) if number % 2 else (False, True):
                measured = step.times_ms(hint)
                if number >= 0:
                    times[hint].append(measured)
        print("x".join(map(str, size)), "ms:", ", ".join(STEPS))
        for hint, name in ((True, "with the hint"), (False, "without")):
            print(f"  {name:14}", [round(statistics.median(c), 4) for c in zip(*times[hint], strict=True)])
        pairs = zip(times[False], times[True], strict=True)
        differences = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
        print("  without - with", [round(statistics.median(c), 4) for c in zip(*differences, strict=True)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
