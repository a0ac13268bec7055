"""The stand-ins for torch.cuda on the CPU. They are process-wide, so each test that installs them forks off."""

from __future__ import annotations

import textwrap

import pytest
import torch
from training_runs import run_python

from megatron_ce_adaptor.megatron import cpu_device


def run_with_shims(code: str) -> None:
    script = "from megatron_ce_adaptor.megatron import cpu_device\ncpu_device.install()\n" + textwrap.dedent(code)
    done = run_python("-c", script, timeout=120)
    assert done.status == 0, done.log


def test_everything_that_megatron_places_on_cuda_lands_on_the_cpu() -> None:
    run_with_shims(
        """
        import torch
        assert torch.cuda.is_available()
        for device in ("cuda", "cuda:1", torch.device("cuda", 0), 0, torch.cuda.current_device()):
            assert torch.empty(2, device=device).device.type == "cpu", device
            assert torch.ones(2).to(device).device.type == "cpu", device
            assert torch.zeros_like(torch.ones(2), device=device).device.type == "cpu", device
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        assert torch.ones(2).cuda().type() == "torch.cuda.FloatTensor"
        assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
        """
    )


def test_events_measure_the_wall_clock() -> None:
    run_with_shims(
        """
        import time, torch
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        time.sleep(0.05)
        end.record()
        assert 45 < start.elapsed_time(end) < 2000
        try:
            start.elapsed_time(torch.cuda.Event())
        except RuntimeError:
            pass
        else:
            raise AssertionError("an event that was never recorded has a time")
        """
    )


def test_memory_is_that_of_the_process() -> None:
    run_with_shims(
        """
        import torch
        before = torch.cuda.memory_allocated()
        block = torch.ones(64 * 2**20, dtype=torch.uint8)
        assert 60 * 2**20 < torch.cuda.memory_allocated() - before < 200 * 2**20
        del block
        torch.cuda.empty_cache()
        assert torch.cuda.max_memory_allocated() >= before + 60 * 2**20
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == torch.cuda.max_memory_allocated()
        assert torch.cuda.memory_stats()["some counter of the CUDA allocator"] == 0
        """
    )


def test_the_cuda_random_state_is_the_cpu_generators() -> None:
    run_with_shims(
        """
        import torch
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4)
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(4))
        """
    )


def test_collectives_take_what_gloo_itself_refuses() -> None:
    run_with_shims(
        """
        import os, tempfile, torch, torch.distributed as dist

        def rank_main(rank, store):
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            parts = [torch.empty(1, 2), torch.empty(3, 2)]
            dist.all_gather(parts, torch.full((1 if rank == 0 else 3, 2), float(rank)))
            assert torch.equal(parts[0], torch.zeros(1, 2)) and torch.equal(parts[1], torch.ones(3, 2))

            sent = torch.arange(3.0) + 10 * rank
            send, receive = [[1, 2], [2, 1]][rank], [[1, 2], [2, 1]][rank]
            received = torch.empty(sum(receive))
            dist.all_to_all_single(received, sent, torch.tensor(receive), torch.tensor(send))
            expected = [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]][rank]
            assert received.tolist() == expected, received

        store = tempfile.mktemp()
        child = os.fork()
        rank_main(1 if child == 0 else 0, store)
        if child:
            assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_a_present_accelerator_is_not_hidden_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "accelerators_present", lambda: ["cuda"])
    monkeypatch.delenv("MCE_DEVICE", raising=False)
    before = (torch.compile, torch.cuda.is_available, torch.Tensor.to)
    with pytest.raises(RuntimeError, match="can use cuda. Set MCE_DEVICE=cpu"):
        cpu_device.install()
    assert (torch.compile, torch.cuda.is_available, torch.Tensor.to) == before


def test_importing_the_package_installs_nothing() -> None:
    done = run_python(
        "-c",
        "import torch; before = (torch.cuda.is_available, torch.compile, torch.empty)\n"
        "import megatron_ce_adaptor, megatron_ce_adaptor.megatron, megatron.core\n"
        "assert before == (torch.cuda.is_available, torch.compile, torch.empty)",
        timeout=120,
    )
    assert done.status == 0, done.log
