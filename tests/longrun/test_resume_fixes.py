"""What is mended in Megatron's loading, on torch's optimizers; test_resumed_training.py has the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from megatron_ce_adaptor.megatron import noise_floor, resume_fixes  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])
def test_state_is_allocated_without_changing_a_parameter(optimizer_class: type, fused: bool) -> None:
    parameters = [torch.randn(5, requires_grad=True), torch.randn(3, 2, requires_grad=True)]
    before = [p.detach().clone() for p in parameters]
    gradient = torch.randn(5)
    parameters[0].grad = gradient
    optimizer = optimizer_class(parameters, lr=0.5, weight_decay=0.3, fused=fused)
    resume_fixes.allocate_state(optimizer)
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in parameters)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert parameters[0].grad is gradient and parameters[1].grad is None


def load_with_one_step_tensor(optimizer: SimpleNamespace, state_dict: object) -> None:
    """What Megatron does: all share a tensor, which the freshly allocated state's value is copied into."""
    step = torch.tensor(1.0)
    for state in optimizer.optimizer.state.values():
        state["step"] = step


@pytest.mark.parametrize("fused", [False, True])
def test_every_parameter_gets_the_saved_step(fused: bool) -> None:
    def trained(steps: int) -> torch.optim.AdamW:
        parameters = [torch.full((4,), 2.0, requires_grad=True), torch.full((3,), 1.0, requires_grad=True)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
        for step in range(steps):
            for p in parameters:
                p.grad = torch.full_like(p, 0.5 + step)
            optimizer.step()
        return optimizer

    whole, part = trained(9), trained(6)
    load = resume_fixes.restore_step_after_loading(load_with_one_step_tensor)
    load(SimpleNamespace(optimizer=part), {"optimizer": {"param_groups": [{}, {"step": 6.0}]}})
    for step in range(6, 9):
        for p in part.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 0.5 + step)
        part.step()
    for a, b in zip(whole.param_groups[0]["params"], part.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
        assert part.state[b]["step"] == 9


def test_optimizers_that_keep_their_step_elsewhere_are_left_alone() -> None:
    seen = []
    load = resume_fixes.restore_step_after_loading(lambda self, state: seen.append(state))
    load(SimpleNamespace(optimizer=object()), {"optimizer": {"param_groups": [{"step": 6}]}})
    assert len(seen) == 1


def test_a_rank_that_leaves_with_status_0_ends_its_run() -> None:
    """torchrun's agent waits for the return value of every forked rank; SystemExit would carry none."""
    program = (
        "import os, sys; os.environ['RANK'] = '0'\n"
        "from megatron_ce_adaptor.megatron import forked_torchrun as f\n"
        "f._run_rank(sys.exit); print('returned')\n"
        "try: f._run_rank(lambda: sys.exit(3))\n"
        "except SystemExit as e: print('code', e.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["returned", "code", "3"], done.stderr


# --- the noise floor -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_logit_moves_to_a_neighbour(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 2, 7, dtype=dtype, requires_grad=True)
    moved = noise_floor.moved_by_one_ulp(logits)
    up, down = (torch.full_like(logits, limit) for limit in (float("inf"), float("-inf")))
    assert torch.equal(moved[..., ::2], torch.nextafter(logits, up)[..., ::2])
    assert torch.equal(moved[..., 1::2], torch.nextafter(logits, down)[..., 1::2])
    upstream = torch.randn_like(moved)
    moved.backward(upstream)
    assert torch.equal(logits.grad, upstream)


@pytest.mark.parametrize("loaded", [0, 40])
def test_the_first_loss_alone_is_disturbed_and_no_continued_run(
    loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    class LanguageModule:
        def compute_language_model_loss(self, labels: object, logits: torch.Tensor) -> None:
            seen.append(logits)

    name = "megatron.core.models.common.language_module.language_module"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(LanguageModule=LanguageModule))
    args = SimpleNamespace(iteration=loaded)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(get_args=lambda: args))
    noise_floor.apply()
    noise_floor.apply()
    logits = torch.randn(4, 1, 6)
    for _ in range(2):
        LanguageModule().compute_language_model_loss(None, logits)
    assert bool((seen[0] != logits).all()) is (loaded == 0)
    assert torch.equal(seen[1], logits)


def test_values_without_a_neighbour_stay() -> None:
    logits = torch.tensor([float("inf"), float("-inf"), float("nan"), float("-inf"), torch.finfo().max])
    moved = noise_floor.moved_by_one_ulp(logits)
    assert torch.equal(moved.nan_to_num(7.0), logits.nan_to_num(7.0))
