#!/usr/bin/env python3
"""Memory and time of output layer and loss at long sequences: Megatron's native, te, te in chunks, Liger.

    python benchmarks/bench_loss_without_logits.py --out loss.json          one GPU, bf16, hidden size 4096
    python benchmarks/bench_loss_without_logits.py --cpu --smoke            whether it runs
    python benchmarks/bench_loss_without_logits.py --render loss.json       the tables of a result, again

For each number of columns (62,080: a rank's of Qwen3.5's 248,320 over four) and of tokens: forward + backward
of the sum of the losses under a loss mask (a tenth is masked) over the number of tokens that count, to the
gradients of the hidden states and of the weight, which the peak includes; the peak counts from before the
call. Chunked te is called as GPTModel's patch calls it. Ways that run out of memory say so. For the fewest
tokens the others' gradients are compared with te's. Prints Markdown tables and whether the goals are met: at
most 3 GB at 262,144 x 62,080, and at most 1.10 x te's time.

Exit status: 0 measured (a peer may have failed, it says so), 1 ours failed, 2 bad arguments, or a file to
render that is none of its results.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a test that imports this keeps its environment
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    os.environ.setdefault("MCE_AUTO_PATCH", "0")
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import memory
import results
import timing
import torch
import torch.nn.functional as F
from bench_chunked import DTYPES, Problem
from peers import megatron_core
from peers.base import PeerMissing
from peers.loading import import_from
from torch import Tensor

IGNORED = -100
PART = "loss_without_logits"
TE, NATIVE, LIGER = "te", "native", "Liger fused linear"
GOAL_SHAPE, GOAL_BYTES, GOAL_TIMES_TE = (262_144, 62_080), 3e9, 1.10
SIZES = {
    "cuda": ((8192, 32768, 131072, 262144), (62080, 248320), 4096, "bf16"),
    "cpu": ((1024, 4096), (4000,), 64, "fp32"),
}
SMOKE = ((24, 48), (96,), 16, "fp32")
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 20


class Masked:
    """A problem with a loss mask; masked labels are ignored ones, so that everyone computes the same."""

    def __init__(
        self, tokens: int, hidden: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        whole = Problem(tokens, hidden, columns, dtype, device)
        self.hidden, self.weight, self.labels = whole.hidden, whole.weight, whole.labels
        draw = torch.Generator(device=device).manual_seed(tokens)
        self.mask = (torch.rand(tokens, generator=draw, device=device) < 0.9).float()
        self.mask[0] = 1
        self.labels[self.mask == 0] = IGNORED
        self.main_grad: Tensor | None = None  # as Megatron has it: there before the call

    def prepare(self) -> None:
        self.hidden.grad = self.weight.grad = None
        if self.main_grad is not None:
            self.main_grad.zero_()

    def d_weight(self) -> Tensor:
        found = self.main_grad if self.main_grad is not None else self.weight.grad
        assert found is not None
        return found

    def mean(self, loss: Tensor) -> Tensor:
        return (loss.reshape(-1) * self.mask).sum() / self.mask.sum()


@dataclasses.dataclass(frozen=True)
class Way:
    """One way: `loss` makes the mean loss of a problem; `load` raises what is missing."""

    name: str
    loss: Callable[[Masked], Tensor]
    load: Callable[[], object] = lambda: None
    into_main_grad: bool = False
    devices: tuple[str, ...] = ("cuda", "cpu")

    @property
    def ours(self) -> bool:
        return self.name.startswith(TE)

    def missing(self, device: str) -> str | None:
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        try:
            self.load()
        except PeerMissing as reason:
            return str(reason)
        except Exception as error:  # whatever a foreign package raises when it is imported
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None


def all_ways(chunks: tuple[int, ...]) -> list[Way]:
    cut = []
    for size in chunks:
        for gradients in ("forward", "backward"):
            name = f"te, chunks of {size}, gradients in {gradients}"
            loss = functools.partial(_chunked, size, gradients == "forward")
            cut += [
                Way(name, functools.partial(loss, None)),
                Way(f"{name}, fp32 main_grad", functools.partial(loss, torch.float32), into_main_grad=True),
            ]
    return [
        Way(NATIVE, _native, _load_native),
        Way(TE, _te),
        *cut,
        Way(LIGER, _liger, _load_liger, devices=("cuda",)),
    ]


def _load_native() -> Any:
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    megatron_core.initialise(1)
    return megatron_core._make_fused()


def _native(problem: Masked) -> Tensor:
    logits = F.linear(problem.hidden, problem.weight)[:, None]
    labels = problem.labels.clamp(min=0)[:, None]  # Megatron's own know no ignored label: the mask does it
    return problem.mean(_load_native()(logits, labels))


def _te(problem: Masked) -> Tensor:
    from megatron_ce_adaptor.megatron.replacements import te_parallel_cross_entropy

    logits = F.linear(problem.hidden, problem.weight)[:, None]
    return problem.mean(te_parallel_cross_entropy(logits, problem.labels[:, None], None))


class _MainGrad:
    """The output layer's own buffer, as with --gradient-accumulation-fusion."""

    def __init__(self, problem: Masked) -> None:
        self._problem = problem

    def buffer(self) -> Tensor:
        return self._problem.d_weight()

    def stand_in(self) -> None:
        return None


def _chunked(size: int, forward: bool, accumulation_dtype: torch.dtype | None, problem: Masked) -> Tensor:
    """The call of `megatron_ce_adaptor.megatron.deferred_logits`."""
    from megatron_ce_adaptor.chunked.linear_loss import LinearLossOptions, loss_per_token
    from megatron_ce_adaptor.vocab_shard import VocabShard

    options = LinearLossOptions(
        shard=VocabShard.of_equal_shards(None, problem.weight.shape[0]),
        chunk_tokens=size,
        accumulation_dtype=accumulation_dtype if size < problem.labels.numel() else None,
        accumulate_hidden=False,
        check_labels=False,
        weight_gradient=_MainGrad(problem) if problem.main_grad is not None else None,
    )
    foreseen = problem.mask if forward else None
    loss, _ = loss_per_token(problem.hidden, problem.weight, problem.labels, options, foreseen=foreseen)
    return problem.mean(loss)


def _load_liger() -> Any:
    from peers import liger

    (module,) = import_from("liger_kernel", liger.VERSION, "liger_kernel.ops.fused_linear_cross_entropy")
    return module.LigerFusedLinearCrossEntropyFunction


def _liger(problem: Masked) -> Tensor:
    return _load_liger().apply(problem.hidden, problem.weight, problem.labels)[0]


# ------------------------------------------------------------------------------------ measuring


class Step:
    """A way on a problem, in the shape that `memory` knows."""

    def __init__(self, way: Way, problem: Masked) -> None:
        self._way, self._problem = way, problem
        self.inputs = self
        self.work = problem.hidden

    def restore(self) -> None:
        pass

    def prepare(self) -> None:
        self._problem.prepare()

    def both(self) -> Tensor:
        loss = self._way.loss(self._problem)
        loss.backward()
        return loss.detach()


def measure(
    ways: list[Way], problem: Masked, seconds: float, compare: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """By name: "ms" and its spread, "peak_bytes", the differences to te's gradients; or "error"."""
    found: dict[str, Any] = {}
    reference: tuple[Tensor, Tensor] | None = None
    steps: dict[str, tuple[Way, Step]] = {}
    for way in sorted(ways, key=lambda w: w.name != TE):  # te first: the others are compared with it
        _set_up(way, problem)
        step = Step(way, problem)
        try:
            step.prepare()
            loss = float(step.both())  # compiles
            found[way.name] = {"loss": loss}
            if compare and way.name == TE:
                assert problem.hidden.grad is not None
                reference = problem.hidden.grad.clone(), problem.d_weight().clone()
            elif reference is not None:
                found[way.name].update(_differences(problem, *reference))
            found[way.name]["peak_bytes"] = memory.peak_extra_bytes(step)  # type: ignore[arg-type]
            steps[way.name] = way, step
        except torch.OutOfMemoryError:
            found[way.name] = {"out_of_memory": True}
        except Exception as error:  # foreign code: its failure is its result
            found[way.name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        say(f"  {way.name}: {found[way.name]}")
        problem.prepare()
        _free(problem)
    del reference
    for name, values in _times(steps, problem, seconds).items():
        found[name].update(timing.summary(values))
    return {way.name: found[way.name] for way in ways}


def _set_up(way: Way, problem: Masked) -> None:
    shape = problem.weight.shape
    problem.main_grad = None
    if way.into_main_grad:
        problem.main_grad = torch.zeros(shape, dtype=torch.float32, device=problem.weight.device)


def _free(problem: Masked) -> None:
    problem.main_grad = None
    gc.collect()
    if problem.hidden.is_cuda:
        torch.cuda.empty_cache()


def _differences(problem: Masked, d_hidden: Tensor, d_weight: Tensor) -> dict[str, float]:
    """Relative, of the norms; bf16 rounds by 2e-3."""
    result = {}
    for key, mine, theirs in (
        ("hidden_difference", problem.hidden.grad, d_hidden),
        ("weight_difference", problem.d_weight(), d_weight),
    ):
        assert mine is not None
        squares = [
            (float((a.float() - b.float()).norm()) ** 2, float(b.float().norm()) ** 2)
            for a, b in zip(mine.split(8192), theirs.split(8192), strict=True)
        ]
        result[key] = (sum(s[0] for s in squares) / sum(s[1] for s in squares)) ** 0.5
    return result


def _times(steps: dict[str, tuple[Way, Step]], problem: Masked, seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    cuda = problem.hidden.is_cuda

    def one(name: str) -> None:
        way, step = steps[name]
        _set_up(way, problem)
        step.prepare()
        if cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            step.both()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            step.both()
            times[name].append((time.perf_counter() - began) * 1e3)
        problem.prepare()
        _free(problem)

    if not steps:
        return times
    began = time.perf_counter()
    for name in steps:
        one(name)
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(seconds / (time.perf_counter() - began))))
    for order in timing.alternate(list(steps), rounds):
        for name in order:
            one(name)
    return {name: values[1:] for name, values in times.items()}


# ------------------------------------------------------------------------------------- reporting


def markdown(part: dict[str, Any]) -> str:
    """A table for each number of columns: time and peak of each way at each number of tokens."""
    environment = part["environment"]
    where = environment.get("gpu") or f"CPU, {environment['threads']} threads"
    settings = part["settings"]
    lines = [
        f"hidden size {settings['hidden']}, {settings['dtype']}; {where}, torch {environment['torch']}, "
        f"{environment['date']}. Each cell: ms (x te), peak GB.",
    ]
    for columns in settings["columns"]:
        cases = [case for case in part["cases"] if case["columns"] == columns]
        if not cases:  # the run was cut off
            lines += ["", f"{columns} columns were not measured"]
            continue
        lines += ["", f"{columns} columns", ""]
        lines.append("| | " + " | ".join(f"{case['tokens']} tokens" for case in cases) + " |")
        lines.append("|---|" + "---|" * len(cases))
        for name in cases[0]["results"]:
            cells = [_cell(case["results"][name], case["results"].get(TE, {})) for case in cases]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, reason in part["missing"].items():
        lines += ["", f"{name} was not measured: {reason}"]
    return "\n".join([*lines, "", *goals(part)])


def _cell(entry: dict[str, Any], te: dict[str, Any]) -> str:
    if "out_of_memory" in entry:
        return "out of memory"
    if "error" in entry:
        return str(entry["error"])
    ratio = f" ({entry['ms'] / te['ms']:.2f})" if "ms" in te else ""
    return f"{entry['ms']:.1f}{ratio}, {entry['peak_bytes'] / 1e9:.2f}"


def goals(part: dict[str, Any]) -> list[str]:
    """A sentence for each goal that this run can answer."""
    lines = []
    for case in part["cases"]:
        te = case["results"].get(TE, {})
        cut = {
            name: entry
            for name, entry in case["results"].items()
            if name.startswith(f"{TE}, chunks") and "ms" in entry
        }
        if (case["tokens"], case["columns"]) == GOAL_SHAPE and cut:
            name, least = min(cut.items(), key=lambda pair: pair[1]["peak_bytes"])
            lines.append(
                f"- loss memory at {case['tokens']} x {case['columns']}: {least['peak_bytes'] / 1e9:.2f} GB "
                f"({name}), goal {GOAL_BYTES / 1e9:g} GB"
            )
        if "ms" in te and cut:
            name, fastest = min(cut.items(), key=lambda pair: pair[1]["ms"])
            lines.append(
                f"- {case['tokens']} x {case['columns']}: {fastest['ms'] / te['ms']:.2f} x te ({name}), goal "
                f"{GOAL_TIMES_TE}"
            )
    return lines


def _numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(word) for word in text.split(","))
    if min(values) < 1:
        raise ValueError(text)
    return values


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU, small")
    parser.add_argument("--tokens", type=_numbers, metavar="N[,N...]")
    parser.add_argument("--columns", type=_numbers, metavar="N[,N...]", help="of the vocabulary on this rank")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--dtype", choices=tuple(DTYPES))
    parser.add_argument("--chunk-tokens", type=_numbers, default=(4096, 8192), metavar="N[,N...]")
    parser.add_argument("--only", metavar="TEXT[;TEXT...]", help="ways whose name begins so; te always runs")
    parser.add_argument("--seconds", type=float, default=10.0, help="timed rounds of a shape, at least three")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see whether it runs")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--render", type=Path, metavar="FILE.json", help="measure nothing, print its tables")
    options = parser.parse_args(arguments)
    if options.render:
        try:
            options.part = json.loads(options.render.read_text(encoding="utf-8"))
            is_ours = options.part["part"] == PART
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--render is {options.render}, which cannot be read: {error}")
        if not is_ours:
            parser.error(f"--render is {options.render}, a result of another benchmark")
        return options
    options.device = "cpu" if options.cpu else "cuda"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: use --cpu")
    sizes = SMOKE if options.smoke else SIZES[options.device]
    for name, size in zip(("tokens", "columns", "hidden", "dtype"), sizes, strict=True):
        setattr(options, name, getattr(options, name) or size)
    if options.hidden < 1:
        parser.error(f"--hidden is {options.hidden}, expected at least 1")
    if options.smoke:
        options.chunk_tokens, options.seconds = (7,), min(options.seconds, 1.0)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.render:
        print(markdown(options.part))
        return 0
    device, dtype = torch.device(options.device), DTYPES[options.dtype]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    ways = all_ways(options.chunk_tokens)
    if options.only:
        ways = [way for way in ways if way.name == TE or way.name.startswith(tuple(options.only.split(";")))]
    missing = {way.name: reason for way in ways if (reason := way.missing(device.type)) is not None}
    for name, reason in missing.items():
        say(f"not measured: {name}: {reason}")
    ways = [way for way in ways if way.name not in missing]
    part: dict[str, Any] = {
        "part": PART,
        "environment": results.environment(device.type),
        "settings": {
            key: getattr(options, key)
            for key in ("tokens", "columns", "hidden", "dtype", "chunk_tokens", "seconds")
        },
        "missing": missing,
        "cases": [],
    }
    for columns in options.columns:
        for tokens in options.tokens:
            say(f"{tokens} tokens, {columns} columns")
            problem = Masked(tokens, options.hidden, columns, dtype, device)
            compare = tokens == min(options.tokens)
            found = measure(ways, problem, options.seconds, compare, say)
            part["cases"].append({"tokens": tokens, "columns": columns, "results": found})
            del problem
            gc.collect()
            if options.out:  # a later shape may be the machine's last
                results.write(part, options.out)
    print(markdown(part))
    failed = {
        name
        for case in part["cases"]
        for name, entry in case["results"].items()
        if name.startswith(TE) and "error" in entry
    }
    failed |= {name for name in missing if name.startswith(TE)}
    if failed:
        say(f"ours failed: {', '.join(sorted(failed))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
