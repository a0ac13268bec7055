"""`torch.compile(fullgraph=True)` out of place: the same loss and gradient as eager, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Device

from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1, "reduce_loss": True, "z_loss_weight": 0.01}],
    ids=["plain", "all_options"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_eager(device: Device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 60, generator=generator).to(dtype).to(device.type)
    target = torch.randint(0, 60, (3, 4), generator=generator).to(device.type)
    target[0, 0] = -100

    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return parallel_cross_entropy(x * 2, labels, **options) * 3

    results = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, target)
        loss.sum().backward()
        results.append((loss.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_an_empty_batch(device: Device) -> None:
    logits = torch.empty(0, 8, device=device.type, requires_grad=True)
    target = torch.empty(0, dtype=torch.int64, device=device.type)
    compiled = torch.compile(parallel_cross_entropy, fullgraph=True, backend="aot_eager")
    loss, statistics = compiled(logits * 1, target, return_statistics=True)
    loss.sum().backward()
    assert loss.shape == statistics.entropy.shape == (0,)
    assert logits.grad is not None and logits.grad.shape == (0, 8)


def test_statistics(device: Device) -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(1)).to(device.type)
    target = torch.tensor([1, 2, 29], device=device.type)

    def entropy_of(x: torch.Tensor) -> torch.Tensor:
        return parallel_cross_entropy(x, target, return_statistics=True)[1].entropy

    compiled = torch.compile(entropy_of, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits), entropy_of(logits))
