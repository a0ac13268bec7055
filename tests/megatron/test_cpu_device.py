"""The stand-ins for torch.cuda on the CPU.  They are process-wide: tests that install them run in a fork."""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training_runs import in_a_fork, run_python

from megatron_ce_adaptor.megatron import cpu_device

MIB = 2**20


def with_shims(body: Callable[..., None]) -> Callable[..., None]:
    """Run a test with the stand-ins in place, in a fork of its own."""

    @functools.wraps(body)
    def install_and_run(**arguments: object) -> None:
        os.environ["MCE_DEVICE"] = "cpu"
        cpu_device.install()
        body(**arguments)

    return in_a_fork(install_and_run)


@with_shims
def test_everything_that_megatron_places_on_cuda_lands_on_the_cpu() -> None:
    assert torch.cuda.is_available()
    for device in ("cuda", "cuda:1", torch.device("cuda", 0), 0, torch.cuda.current_device()):
        assert torch.empty(2, device=device).device.type == "cpu"
        assert torch.ones(2).to(device).device.type == "cpu"
        assert torch.zeros_like(torch.ones(2), device=device).device.type == "cpu"
    assert torch.ones(2).to(torch.float64).dtype == torch.float64
    assert torch.ones(2).cuda().type() == "torch.cuda.FloatTensor"
    assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"


@with_shims
def test_events_measure_the_wall_clock() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.05)
    end.record()
    assert 45 < start.elapsed_time(end) < 5000  # ms
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(torch.cuda.Event())


@with_shims
def test_memory_is_that_of_the_process() -> None:
    before = torch.cuda.memory_allocated()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert 60 * MIB < torch.cuda.memory_allocated() - before < 200 * MIB
    del block
    assert torch.cuda.max_memory_allocated() >= before + 60 * MIB
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= before + 60 * MIB
    assert stats["some counter of the CUDA allocator"] == 0


@with_shims
def test_the_cuda_random_state_is_the_cpu_generators() -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    assert not torch.equal(first, torch.rand(4))
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(4))


def _uneven_collectives(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parts = [torch.empty(1, 2), torch.empty(3, 2)]
    dist.all_gather(parts, torch.full((1 if rank == 0 else 3, 2), float(rank)))
    assert torch.equal(parts[0], torch.zeros(1, 2))
    assert torch.equal(parts[1], torch.ones(3, 2))

    sizes = torch.tensor([[1, 2], [2, 1]][rank])
    received = torch.empty(3)
    dist.all_to_all_single(received, torch.arange(3.0) + 10 * rank, sizes, sizes)
    assert received.tolist() == [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]][rank]


@with_shims
def test_collectives_take_what_gloo_itself_refuses(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            _uneven_collectives(1, tmp_path / "store")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _uneven_collectives(0, tmp_path / "store")
    assert os.waitpid(child, 0)[1] == 0


def test_a_present_accelerator_is_not_hidden_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "accelerators_present", lambda: ["cuda"])
    monkeypatch.delenv("MCE_DEVICE", raising=False)
    before = (torch.compile, torch.cuda.is_available, torch.Tensor.to)
    with pytest.raises(RuntimeError, match=r"can use cuda\. Set MCE_DEVICE=cpu"):
        cpu_device.install()
    assert (torch.compile, torch.cuda.is_available, torch.Tensor.to) == before


@pytest.mark.slow
def test_importing_the_package_installs_nothing() -> None:
    done = run_python(
        "-c",
        "import torch; before = (torch.cuda.is_available, torch.compile, torch.empty)\n"
        "import megatron_ce_adaptor, megatron_ce_adaptor.megatron, megatron.core\n"
        "assert before == (torch.cuda.is_available, torch.compile, torch.empty)",
    )
    assert done.status == 0, done.log
