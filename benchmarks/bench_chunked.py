#!/usr/bin/env python3
"""Time and memory of an output layer with its cross entropy: ours in chunks, and every published way.

    python benchmarks/bench_chunked.py --out chunked.json             one GPU, bf16, 8192 x 4096 x 128256
    python benchmarks/bench_chunked.py --cpu --out chunked_cpu.json   a CPU, fp32, 4096 x 512 x 32768

Forward + backward of the mean loss, to the gradients of the hidden states and of the weight. The floor is the
time of the three matrix products alone (logits and both gradients) in the same rounds. Peak memory counts
from before the call and includes both gradients. Errors are against fp32 arithmetic on the same inputs. Peers
come from .peers (benchmarks/fetch_peers.py); those that cannot run are listed with the reason. Prints a
Markdown table.

Exit status: 0 measured (some peers may have failed; they say so), 1 ours failed, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # a test that imports this keeps its environment
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    os.environ.setdefault("MCE_AUTO_PATCH", "0")
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import memory
import results
import timing
import torch
from linear_losses import LinearLoss, linear_losses
from torch import Tensor, nn

FLOOR = "three matrix products"
SHAPES = {"cuda": (8192, 4096, 128256, "bf16"), "cpu": (4096, 512, 32768, "fp32")}
SMOKE = (24, 16, 96)
CHUNKS = {"cuda": (2, 3, 4, 5, 8, 16, 32), "cpu": (2, 4, 8, 16)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_FEWEST_ROUNDS, _MOST_ROUNDS, _SLOW_ROUNDS = 5, 60, 5


class Problem:
    """Hidden states, weight and labels; the weight's scale gives logits of a standard deviation of 1."""

    def __init__(
        self, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        g = torch.Generator(device=device).manual_seed(tokens * 31 + vocab)
        self.hidden = torch.randn(tokens, hidden, generator=g, device=device).to(dtype).requires_grad_()
        weight = torch.empty(vocab, hidden, dtype=dtype, device=device)
        for block in weight.split(8192):
            block.copy_(torch.randn(block.shape, generator=g, device=device) * hidden**-0.5)
        self.weight = nn.Parameter(weight)
        self.labels = torch.randint(0, vocab, (tokens,), generator=g, device=device)

    def forget(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def exact(self) -> tuple[float, Tensor, Tensor]:
        """Loss and both gradients in fp32, a few tokens at a time."""
        n = self.labels.numel()
        with torch.no_grad():
            weight = self.weight.float()
            d_weight = torch.zeros_like(weight)
            d_hidden = torch.empty(self.hidden.shape, device=weight.device)
            total = torch.zeros((), dtype=torch.float64, device=weight.device)
            step = max(1, 2**28 // weight.shape[0])
            for start in range(0, n, step):
                rows = slice(start, start + step)
                h, y = self.hidden[rows].float(), self.labels[rows, None]
                log_prob = (h @ weight.t()).log_softmax(-1)
                total -= log_prob.gather(1, y).sum(dtype=torch.float64)
                gradient = log_prob.exp_().scatter_add_(1, y, -torch.ones_like(y, dtype=h.dtype)).div_(n)
                d_hidden[rows] = gradient @ weight
                d_weight.addmm_(gradient.t(), h)
        return float(total) / n, d_hidden, d_weight


class Step:
    """One way on the problem, in the shape that `memory` and `timing` know."""

    def __init__(self, name: str, run: Callable[[], Any], problem: Problem) -> None:
        self.name, self.both, self._problem = name, run, problem
        self.inputs = SimpleNamespace(work=problem.hidden, restore=lambda: None)

    def prepare(self) -> None:
        self._problem.forget()


def loss_step(way: LinearLoss, problem: Problem) -> Step:
    mean = way.make()

    def run() -> Tensor:
        loss = mean(problem.hidden, problem.weight, problem.labels)
        loss.backward()
        return loss.detach()

    return Step(way.name, run, problem)


def floor_step(problem: Problem) -> Step:
    """The matrix products alone, into memory that is there already."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=d_hidden)
        torch.mm(logits.t(), hidden, out=d_weight)

    return Step(FLOOR, run, problem)


def measure(
    ways: list[LinearLoss], problem: Problem, seconds: float, memory_only: bool, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """By name: times, the median of paired ratios to the floor, peak memory and errors; or the error."""
    exact = None if memory_only else problem.exact()
    found: dict[str, dict[str, Any]] = {FLOOR: {}}
    steps = {FLOOR: floor_step(problem)}
    slow = {way.name for way in ways if way.slow}
    for way in ways:
        try:
            began = time.perf_counter()
            step = loss_step(way, problem)
            found[way.name] = _check(step, problem, exact)
            steps[way.name] = step
            say(f"  {way.name}: warm after {time.perf_counter() - began:.1f} s")
        except Exception as error:  # foreign code: its failure is its result
            found[way.name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            say(f"  {way.name}: {found[way.name]['error']}")
        problem.forget()
    del exact
    if problem.hidden.is_cuda:
        torch.cuda.empty_cache()
    if memory_only:
        return found
    times = _time(steps, slow, problem, seconds)
    for name, values in times.items():
        found[name].update(timing.summary(values))
        # a slow one has fewer rounds, the first ones
        pairs = zip(values, times[FLOOR], strict=False)
        found[name]["times_floor"] = statistics.median(a / b for a, b in pairs)
    return found


def _check(step: Step, problem: Problem, exact: tuple[float, Tensor, Tensor] | None) -> dict[str, Any]:
    """Compiles and warms up, compares, and measures memory."""
    step.prepare()
    mine = float(step.both())
    result = {} if exact is None else _errors(mine, problem, *exact)
    step.prepare()
    if exact is not None:
        step.both()
        step.prepare()
    result["peak_bytes"] = memory.peak_extra_bytes(step)  # type: ignore[arg-type]
    return result


def _errors(mine: float, problem: Problem, loss: float, d_hidden: Tensor, d_weight: Tensor) -> dict[str, Any]:
    """Relative errors of the loss and of the gradients' norms."""
    result: dict[str, Any] = {"loss_error": abs(mine - loss) / abs(loss)}
    for key, parameter, expected in (
        ("hidden_error", problem.hidden, d_hidden),
        ("weight_error", problem.weight, d_weight),
    ):
        assert parameter.grad is not None
        squares = 0.0
        for a, b in zip(parameter.grad.split(8192), expected.split(8192), strict=True):
            squares += float((a.float() - b).square().sum(dtype=torch.float64))
        result[key] = squares**0.5 / float(expected.norm())
    return result


def _time(steps: dict[str, Step], slow: set[str], problem: Problem, seconds: float) -> dict[str, list[float]]:
    device = problem.hidden.device
    clock = timing.GpuClock(device) if device.type == "cuda" else None
    times: dict[str, list[float]] = {name: [] for name in steps}

    def one(name: str) -> None:
        step = steps[name]
        if clock is not None:
            times[name].append(clock.time(step.prepare, step.both, 2000.0))
        else:
            step.prepare()
            began = time.perf_counter()
            step.both()
            times[name].append((time.perf_counter() - began) * 1e3)
        problem.forget()

    began = time.perf_counter()
    for name in steps:
        one(name)
    took = time.perf_counter() - began
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(seconds / took)))
    for number, order in enumerate(timing.alternate(list(steps), rounds)):
        for name in order:
            if number < _SLOW_ROUNDS or name not in slow:
                one(name)
    return {name: values[1:] for name, values in times.items()}


def markdown(part: dict[str, Any]) -> str:
    """The table: one row a way."""
    tokens, hidden, vocab = (part["settings"][key] for key in ("tokens", "hidden", "vocab"))
    environment = part["environment"]
    where = environment.get("gpu") or f"CPU, {environment['threads']} threads"
    lines = [
        f"{tokens} tokens, hidden size {hidden}, vocabulary {vocab}, {part['settings']['dtype']}; {where}, "
        f"torch {environment['torch']}, {environment['date']}",
        "",
        "| | ms | x three products | peak MiB | loss error | hidden error | weight error |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in part["results"].items():
        if "error" in entry or "missing" in entry:
            lines.append(f"| {name} | {entry.get('error') or entry.get('missing')} | | | | | |")
            continue
        time = f"{entry['ms']:.2f} | {entry['times_floor']:.3f}" if "ms" in entry else " | "
        peak = f"{entry['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in entry else ""
        errors = [
            f"{entry[key]:.1e}" if key in entry else ""
            for key in ("loss_error", "hidden_error", "weight_error")
        ]
        lines.append(f"| {name} | {time} | {peak} | {' | '.join(errors)} |")
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cpu", action="store_true", help="the same as --device cpu")
    for name in ("tokens", "hidden", "vocab"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=tuple(DTYPES))
    parser.add_argument("--chunks", metavar="N[,N...]", help="ours is cut into so many")
    parser.add_argument("--only", metavar="TEXT[,TEXT...]", help="ways whose name begins so")
    parser.add_argument("--seconds", type=float, default=45.0, help="timed rounds of all together")
    parser.add_argument("--memory-only", action="store_true", help="peak memory alone: two calls each")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, to see whether it runs")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch on the CPU")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    if options.cpu:
        options.device = "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: use --cpu")
    *sizes, dtype = SHAPES[options.device]
    for name, size in zip(("tokens", "hidden", "vocab"), SMOKE if options.smoke else sizes, strict=True):
        given = getattr(options, name)
        if given is not None and given < 1:
            parser.error(f"--{name} is {given}, expected at least 1")
        setattr(options, name, given or size)
    options.dtype = options.dtype or dtype
    options.seconds = min(options.seconds, 1.0) if options.smoke else options.seconds
    try:
        chunks = (
            tuple(int(x) for x in options.chunks.split(",")) if options.chunks else CHUNKS[options.device]
        )
    except ValueError:
        parser.error(f"--chunks is {options.chunks!r}, expected numbers with commas between them")
    if min(chunks) < 1:
        parser.error(f"--chunks is {options.chunks!r}, expected at least 1")
    options.chunks = chunks
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    if device.type == "cpu":
        torch.set_num_threads(options.threads)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    ways = linear_losses(options.chunks, 8)
    if options.only:
        ways = [way for way in ways if way.name.startswith(tuple(options.only.split(",")))]
    missing = {way.name: way.missing(device.type, dtype) for way in ways}
    for name, reason in missing.items():
        if reason:
            say(f"not measured: {name}: {reason}")
    problem = Problem(options.tokens, options.hidden, options.vocab, dtype, device)
    usable = [way for way in ways if missing[way.name] is None]
    found = measure(usable, problem, options.seconds, options.memory_only, say)
    part = {
        "part": "chunked",
        "environment": results.environment(device.type),
        "settings": {
            key: getattr(options, key) for key in ("tokens", "hidden", "vocab", "dtype", "chunks", "seconds")
        },
        "results": found | {name: {"missing": reason} for name, reason in missing.items() if reason},
    }
    print(markdown(part))
    if options.out:
        results.write(part, options.out)
    failed = [way.name for way in ways if way.ours and "error" in found.get(way.name, {})]
    if failed or not any(way.ours for way in usable):
        say(f"ours failed: {', '.join(failed) or 'nothing of ours was measured'}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
