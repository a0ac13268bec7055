#!/usr/bin/env python3
"""Time the cross entropy of this package beside every published one, in one run.

    python benchmarks/bench_cross_entropy.py --out results.json             one GPU
    torchrun --nproc-per-node 2 benchmarks/bench_cross_entropy.py --tp 2 --out results.json
    python benchmarks/bench_cross_entropy.py --cpu --out results.json       two threads of a CPU

Forward + backward of the loss of each token with a random upstream gradient, a tenth of it zeros; logits
are not a leaf. Peers come from .peers (benchmarks/fetch_peers.py) and from what is installed; those that
cannot run are listed with the reason. Prints a Markdown table; render_results.py makes it again, with a
plot.

Exit status: 0 measured (some peers may have failed; they say so), 1 ours failed on a case, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a test that imports this keeps its environment
    # One cache of compiled kernels and no pool of compile workers beside the measured process.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    # Megatron as published: no counters of ours in its functions.
    os.environ.setdefault("MCE_AUTO_PATCH", "0")
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import cases as case_lists
import results
import torch
import torch.distributed as dist
from measure import measure_case
from peers import Peer, all_peers, megatron_core
from render_results import markdown
from timing import GpuClock


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cpu", action="store_true", help="the same as --device cpu")
    parser.add_argument("--tp", type=int, default=1, metavar="RANKS", help="ranks, started by torchrun")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--only", metavar="TEXT[,TEXT...]", help="peers whose name begins so, and ours")
    parser.add_argument("--without", metavar="TEXT[,TEXT...]", default="", help="leave these peers out")
    parser.add_argument("--cases", metavar="TEXT[,TEXT...]", help="cases whose name begins so")
    parser.add_argument("--quick", action="store_true", help="few cases, one second each")
    parser.add_argument("--tiny", action="store_true", help="cases of a few rows, to see whether it runs")
    parser.add_argument(
        "--seconds-per-case", type=float, default=6.0, help="timed rounds of all peers together"
    )
    parser.add_argument(
        "--time-limit", type=float, default=540.0, help="seconds after which no case is begun"
    )
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch on the CPU")
    options = parser.parse_args(arguments)
    if options.cpu:
        options.device = "cpu"
    if options.quick:
        options.seconds_per_case = min(options.seconds_per_case, 1.0)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if options.tp != world:
        parser.error(
            f"--tp {options.tp} needs {options.tp} processes, and there are {world}: start it with torchrun"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: use --cpu")
    return options


def choose_cases(options: argparse.Namespace) -> list[case_lists.Case]:
    chosen: tuple[case_lists.Case, ...]
    if options.tiny:
        chosen = case_lists.TINY
    elif options.device == "cpu":
        chosen = case_lists.CPU_QUICK if options.quick else case_lists.CPU_CASES
    elif options.tp > 1:
        chosen = case_lists.TP_QUICK if options.quick else case_lists.TP_CASES
    else:
        chosen = case_lists.CUDA_QUICK if options.quick else case_lists.CUDA_CASES
    if options.cases:
        chosen = tuple(c for c in chosen if c.name.startswith(tuple(options.cases.split(","))))
    if not chosen:
        raise SystemExit(f"no case begins with {options.cases!r}")
    return list(chosen)


def choose_peers(options: argparse.Namespace) -> list[Peer]:
    peers = all_peers()
    if options.only:
        wanted = tuple(options.only.split(","))
        peers = [p for p in peers if p.ours or p.name.startswith(wanted)]
    if options.without:
        peers = [p for p in peers if p.ours or not p.name.startswith(tuple(options.without.split(",")))]
    return peers


def start_process_group(options: argparse.Namespace, peers: list[Peer]) -> tuple[torch.device, Any]:
    """(device, group of all ranks, None on one rank)."""
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(options.threads)
    if options.tp == 1 and not any(p.needs_process_group for p in peers):
        return device, None
    backend = "nccl" if options.device == "cuda" else "gloo"
    if options.tp > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device, dist.group.WORLD if options.tp > 1 else None


def list_peers(peers: list[Peer], options: argparse.Namespace) -> tuple[list[Peer], list[dict[str, Any]]]:
    """(those that can run here, what is known of each)."""
    if any(p.needs_process_group for p in peers):
        try:
            megatron_core.initialise(options.tp)
        except Exception as error:  # it is named below, when the peer is asked
            print(f"Megatron's groups: {error}", file=sys.stderr)
    usable, listed = [], []
    for peer in peers:
        reason = peer.available(options.device, options.tp)
        version = None if reason else peer.version()
        listed.append(
            {
                "name": peer.name,
                "version": version,
                "ours": peer.ours,
                "in_place": peer.in_place,
                "saves": peer.saves,
                "missing": reason,
            }
        )
        if reason is None:
            usable.append(peer)
    return usable, listed


def machine_bandwidth(device: torch.device) -> float:
    """GB/s of reading and writing 2 GiB in place."""
    flat = torch.ones(2**30, dtype=torch.bfloat16, device=device)
    clock = GpuClock(device)
    times = sorted(clock.in_place_ms(flat) for _ in range(30))
    return 2 * flat.numel() * 2 / times[len(times) // 2] / 1e6


def main(arguments: list[str] | None = None) -> int:
    began = time.perf_counter()
    options = parse(arguments)
    chosen = choose_cases(options)
    peers = choose_peers(options)
    device, group = start_process_group(options, peers)
    leader = group is None or group.rank() == 0

    def say(text: str) -> None:
        if leader:
            print(text, file=sys.stderr, flush=True)

    usable, listed = list_peers(peers, options)
    for entry in listed:
        if entry["missing"]:
            say(f"not measured: {entry['name']}: {entry['missing']}")
    part: dict[str, Any] = {
        "part": "cpu" if options.device == "cpu" else "tp" if options.tp > 1 else "cuda",
        "environment": results.environment(options.device),
        "settings": {"seconds_per_case": options.seconds_per_case, "ranks": options.tp, "only": options.only},
        "peers": listed,
        "cases": [],
        "not_begun": [],
    }
    if options.device == "cuda":
        part["in_place_gb_per_s"] = machine_bandwidth(device)
    for case in chosen:
        late = torch.tensor(float(time.perf_counter() - began > options.time_limit), device=device)
        if group is not None:
            dist.all_reduce(late, dist.ReduceOp.MAX)
        if bool(late):
            part["not_begun"].append(case.name)
            continue
        say(f"{case.name} ({time.perf_counter() - began:.0f} s)")
        part["cases"].append(measure_case(case, usable, device, group, options.seconds_per_case, say))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if options.out and leader:
            results.write(part, options.out)
    for name in part["not_begun"]:
        say(f"not measured: {name}: the time limit of {options.time_limit:.0f} s had passed")
    if leader:
        print(markdown(part))
    if dist.is_initialized():
        dist.destroy_process_group()
    own = [p.name for p in usable if p.ours]
    failed = [c["name"] for c in part["cases"] for name in own if "error" in c["results"][name]]
    if failed or not own:
        say(f"ours failed on: {', '.join(failed) or 'everything'}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
