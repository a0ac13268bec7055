"""The chunked loss on an NVIDIA GPU: compiled kernels, fp32 sums of bf16 products, no host waiting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from dense import Problem, assert_close, assert_number, reference
from torch import nn

from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss
from megatron_ce_adaptor.chunked.linear_loss import LinearLossOptions, loss_per_token
from megatron_ce_adaptor.vocab_shard import VocabShard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


def on_gpu(p: Problem) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    head = nn.Linear(p.weight.shape[1], p.weight.shape[0], bias=p.bias is not None, dtype=p.weight.dtype)
    with torch.no_grad():
        head.weight.copy_(p.weight)
        if p.bias is not None:
            head.bias.copy_(p.bias)
    return head.cuda(), p.hidden.cuda().requires_grad_(), p.labels.cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("accumulation_dtype", [None, torch.float32])
def test_equals_dense(dtype, accumulation_dtype):
    p = Problem.make((4, 512), 64, 1009, dtype=dtype)
    p.weight.mul_(0.2)
    terms = {"weight": p.class_weight.float(), "label_smoothing": 0.1, "z_loss_weight": 1e-3}
    expected = reference(p, divisor=p.valid, upstream=1 / 3, **terms)
    head, hidden, labels = on_gpu(p)
    terms["weight"] = terms["weight"].cuda()
    criterion = ChunkedLossWrapper(
        CrossEntropyLoss(report_metrics=True, **terms), num_chunks=6, accumulation_dtype=accumulation_dtype
    ).set_lm_head(head)
    loss, metrics = criterion(hidden, labels, torch.tensor(p.valid, device="cuda"))
    (loss / 3).backward()
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # class weights and 1/n are fp32
    assert_number(loss.cpu(), expected.loss, "loss", 4 * eps)
    assert_number(metrics["entropy/mean"].cpu(), expected.metrics["entropy/mean"], "entropy", 4 * eps)
    assert_close(hidden.grad.cpu(), expected.hidden, "hidden", 4 * eps)
    assert_close(head.weight.grad.cpu(), expected.weight, "weight", 4 * eps)
    assert_close(head.bias.grad.cpu(), expected.bias, "bias", 4 * eps)


def test_fp32_sums_are_of_products_that_were_not_rounded():
    p = Problem.make((1, 4096), 64, 257, dtype=torch.bfloat16, bias=False)
    p.weight.mul_(0.2)
    expected = reference(p, divisor=p.valid)
    errors = []
    for accumulation_dtype in (None, torch.float32):
        head, hidden, labels = on_gpu(p)
        criterion = ChunkedLossWrapper(
            CrossEntropyLoss(bare=True), num_chunks=64, accumulation_dtype=accumulation_dtype
        )
        criterion.set_lm_head(head)(hidden, labels, p.valid).backward()
        errors.append(
            float((head.weight.grad.double().cpu() - expected.weight).norm() / expected.weight.norm())
        )
    assert errors[1] < 0.5 * errors[0]


def test_the_host_never_waits():
    p = Problem.make((4, 256), 64, 1024, dtype=torch.bfloat16)
    head, hidden, labels = on_gpu(p)
    count = torch.tensor(p.valid, device="cuda")
    criterion = ChunkedLossWrapper(CrossEntropyLoss(report_metrics=True), num_chunks=4).set_lm_head(head)
    criterion(hidden, labels, count)[0].backward()  # compiles
    head.weight.grad = head.bias.grad = hidden.grad = None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (criterion(hidden, labels, count)[0] * 0.5).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert head.weight.grad.isfinite().all()


def test_peak_memory():
    tokens, size, vocab, chunks = 4096, 256, 32000, 4
    head = nn.Linear(size, vocab, bias=False, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    criterion = ChunkedLossWrapper(CrossEntropyLoss(bare=True), num_chunks=chunks).set_lm_head(head)
    criterion(hidden, labels, tokens).backward()
    head.weight.grad = hidden.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (criterion(hidden, labels, tokens) * 0.5).backward()
    peak = torch.cuda.max_memory_allocated() - before
    known = 2 * (tokens * vocab // chunks + (tokens + vocab) * size)
    assert known <= peak < known + 2**20


@pytest.mark.parametrize("foretold", [True, False])
@pytest.mark.parametrize("into_buffer", [True, False])
def test_losses_of_each_token_with_a_foreseen_gradient(foretold, into_buffer):
    p = Problem.make((1, 2048), 64, 1009, dtype=torch.bfloat16, bias=False, ignored=0.0)
    p.weight.mul_(0.2)
    mask = torch.rand(2048, generator=torch.Generator().manual_seed(0)) < 0.8
    head, hidden, labels = on_gpu(p)
    main = torch.ones_like(head.weight, dtype=torch.float32)
    options = LinearLossOptions(
        shard=VocabShard.of_equal_shards(None, 1009),
        chunk_tokens=300,
        accumulation_dtype=torch.float32,
        accumulate_hidden=False,
        weight_gradient=SimpleNamespace(buffer=lambda: main, stand_in=lambda: None) if into_buffer else None,
    )
    foreseen = mask if foretold else ~mask
    loss, _ = loss_per_token(
        hidden.flatten(0, 1), head.weight, labels.flatten(), options, foreseen=foreseen.float().cuda()
    )
    ((loss * mask.cuda()).sum() / 3).backward()
    p.labels[0, ~mask] = -100
    expected = reference(p, divisor=3)
    found = main - 1 if into_buffer else head.weight.grad.float()
    eps = torch.finfo(torch.bfloat16).eps
    assert_close(hidden.grad.cpu(), expected.hidden, "hidden", 4 * eps)
    assert_close(found.cpu(), expected.weight, "weight", 4 * eps)
