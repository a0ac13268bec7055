"""The chunked core on plain tensors: loss_per_token, weighted_loss, buffers to add to, and the scaling."""

from __future__ import annotations

import os
import random

import pytest
import rank_programs as programs
import torch
import torch.nn.functional as F
from dense import Problem, all_terms, assert_close, assert_number

from megatron_ce_adaptor.chunked import linear_loss, walk
from megatron_ce_adaptor.chunked.linear_loss import LinearLossOptions, loss_per_token, weighted_loss
from megatron_ce_adaptor.chunked.scaling import scaled
from megatron_ce_adaptor.vocab_shard import VocabShard


def options(vocab: int, chunk_tokens: int, **more) -> LinearLossOptions:
    if "weight" in more:
        more["class_weight"] = more.pop("weight")
    shard = VocabShard.of_equal_shards(None, vocab)
    return LinearLossOptions(shard=shard, chunk_tokens=chunk_tokens, **more)


def dense(p: Problem, upstream: torch.Tensor, **terms) -> list[torch.Tensor]:
    """Losses, and gradients of sum(upstream * loss)."""
    inputs = [x.double().clone().requires_grad_() for x in (p.hidden, p.weight, p.bias)]
    logits = F.linear(*inputs)
    loss = F.cross_entropy(
        logits,
        p.labels,
        weight=terms.get("weight"),
        label_smoothing=terms.get("label_smoothing", 0.0),
        reduction="none",
    )
    kept = (p.labels != -100).double()
    loss = loss + terms.get("z_loss_weight", 0.0) * kept * logits.logsumexp(-1).square()
    return [loss.detach(), *torch.autograd.grad(loss, inputs, upstream.double())]


class MainGrad:
    """A buffer of somebody else's, which holds ones."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        self.total = torch.ones_like(like, dtype=dtype)

    def buffer(self) -> torch.Tensor:
        return self.total

    def stand_in(self) -> None:
        return None


@pytest.mark.parametrize("into_buffer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_foreseen_upstream_gradient_and_others(dtype, into_buffer):
    """Its multiples are a multiplication; anything else, and a second backward, is computed again."""
    p = Problem.make((13,), 6, 11, dtype=dtype)
    draw = torch.Generator().manual_seed(1)
    weights = torch.rand(13, dtype=torch.float64, generator=draw)
    mask = (weights > 0.4).double()
    close = {"tolerance": 1e-12 if dtype == torch.float64 else 2e-3}
    for foreseen, upstream, foretold in (
        (mask, mask / 7, True),
        (mask, mask * -3, True),
        (mask, mask * 0, True),
        (weights, weights * 0.3, True),
        (mask, weights, False),
        (mask, mask + 1e-3 * (1 - mask), False),
        (mask * 0, mask, False),
    ):
        expected = dense(p, upstream)
        inputs = [x.clone().requires_grad_() for x in (p.hidden, p.weight, p.bias)]
        main = MainGrad(p.weight, torch.float64 if dtype == torch.float64 else torch.float32)
        settings = options(11, 4, weight_gradient=main if into_buffer else None)
        passes = CountedPasses()
        with passes:
            loss, _ = loss_per_token(inputs[0], inputs[1], p.labels, settings, inputs[2], foreseen)
        assert passes.gradients == 4
        assert_close(loss, expected[0], "loss", **close)
        for again in (False, True):
            with passes:
                found = list(
                    torch.autograd.grad(
                        loss, inputs, upstream.to(loss.dtype), retain_graph=True, allow_unused=into_buffer
                    )
                )
            assert passes.gradients == (0 if foretold and not again else 4)
            if into_buffer:
                assert found[1] is None
                found[1] = main.total - 1
                main.total.fill_(1)
            for actual, wanted in zip(found, expected[1:], strict=True):
                if wanted.any():
                    assert_close(actual, wanted, "gradient", **close)
                else:
                    assert not actual.any()


class CountedPasses:
    """Counts the chunks whose gradient is computed inside."""

    def __enter__(self) -> None:
        self.gradients = 0
        self._original = walk.Gradients.take

        def take(*args):
            self.gradients += 1
            self._original(*args)

        walk.Gradients.take = take

    def __exit__(self, *exception: object) -> None:
        walk.Gradients.take = self._original


def test_a_foreseen_gradient_that_is_none_is_refused():
    p = Problem.make((13,), 6, 11)
    with pytest.raises(
        ValueError, match=r"foreseen has shape \(12,\), expected one number for each of the 13"
    ):
        loss_per_token(p.hidden, p.weight, p.labels, options(11, 4), p.bias, torch.ones(12))


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
@pytest.mark.parametrize("form", ["per token", "weighted"])
def test_any_gradient_of_each_token(form, chunk_tokens):
    # HAZARDS 2: the first is 0
    for case in range(5):
        p = Problem.make((13,), 6, 11, seed=case)
        terms = all_terms(p)[case]
        upstream = torch.randn(13, dtype=torch.float64, generator=torch.Generator().manual_seed(case))
        upstream[0] = 0
        loss, *grads = dense(p, upstream, **terms)
        inputs = [x.clone().requires_grad_() for x in (p.hidden, p.weight, p.bias)]
        settings = options(11, chunk_tokens, statistics=case == 0, **terms)
        if form == "per token":
            result, statistics = loss_per_token(inputs[0], inputs[1], p.labels, settings, inputs[2])
            found = torch.autograd.grad(result, inputs, upstream)
        else:
            total, result, statistics = weighted_loss(
                inputs[0], inputs[1], p.labels, upstream / 4, settings, inputs[2]
            )
            assert not result.requires_grad
            assert_number(total, float((loss * upstream).sum() / 4), "total")
            found = torch.autograd.grad(total * 4, inputs)
        assert_close(result, loss, "loss")
        assert (statistics is not None) == (case == 0)
        for actual, expected in zip(found, grads, strict=True):
            assert_close(actual, expected, "gradient")


def test_backward_twice_of_losses_per_token():
    p = Problem.make((13,), 6, 11)
    hidden = p.hidden.clone().requires_grad_()
    loss, _ = loss_per_token(hidden, p.weight, p.labels, options(11, 4), p.bias)
    first, second = (torch.autograd.grad(loss.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss.sum(), hidden, create_graph=True)


def test_chunks_never_hold_more_than_their_logits():
    p = Problem.make((64,), 4, 50, dtype=torch.float32)
    largest = 0
    original = walk.dispatch.forward_pass

    def spy(module, logits, *rest):
        nonlocal largest
        largest = max(largest, logits.untyped_storage().nbytes())
        return original(module, logits, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk.dispatch, "forward_pass", spy)
        weighted_loss(p.hidden, p.weight, p.labels, torch.ones(64), options(50, 8), p.bias)
    assert largest == 8 * 50 * 4


def test_gradients_are_added_to_what_a_buffer_holds():
    """As Megatron's main_grad, which is fp32 beside bf16 weights."""
    p = Problem.make((16,), 6, 11, dtype=torch.bfloat16)
    loss, hidden, weight, bias = dense(p, torch.full((16,), 0.5))
    main = [torch.full(x.shape, 3.0) for x in (p.weight, p.bias)]
    gradients = walk.Gradients(torch.empty_like(p.hidden), *main, accumulate=True)
    layer = linear_loss._output_layer(p.weight, p.bias, p.labels, options(11, 5), torch.bfloat16)
    found = walk.losses_and_gradients(
        p.hidden, p.labels, layer, torch.full((16,), 0.5), gradients, statistics=False
    )
    assert_close(found.loss, loss, "loss", 2e-2)
    assert_close(gradients.hidden, hidden, "hidden", 2e-2)
    assert_close(main[0] - 3, weight, "weight", 2e-2)
    assert_close(main[1] - 3, bias, "bias", 2e-2)


def test_exchanges_on_ranks(rank_pools):
    """loss_per_token over sequence-parallel hidden states and a split vocabulary, with any upstream."""
    for forward, backward in rank_pools(2).run(programs.sequence_parallel_per_token):
        assert forward == {"all_gather": 1 + 3}
        assert backward == {"all_gather": 1, "reduce_scatter": 1}  # hidden is not kept gathered


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens is 0, expected at least 1"),
        ({"chunk_tokens": 2.5}, TypeError, "chunk_tokens is 2.5, expected an int"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing is 2.0"),
        ({"z_loss_weight": float("inf")}, ValueError, "z_loss_weight is inf"),
        ({"accumulation_dtype": torch.float16}, ValueError, "accumulation_dtype is torch.float16"),
    ],
)
def test_options_out_of_range(change, error, words):
    p = Problem.make((13,), 6, 11)
    settings = options(11, **{"chunk_tokens": 4, **change})
    with pytest.raises(error, match=words):
        loss_per_token(p.hidden, p.weight, p.labels, settings, p.bias)


def test_tensors_that_do_not_fit():
    p = Problem.make((13,), 6, 11)
    settings = options(11, 4)
    with pytest.raises(ValueError, match="token_weight has shape"):
        weighted_loss(p.hidden, p.weight, p.labels, torch.ones(12), settings, p.bias)
    with pytest.raises(ValueError, match="there are 12 labels for 13 hidden states"):
        loss_per_token(p.hidden, p.weight, p.labels[:12], settings, p.bias)
    with pytest.raises(ValueError, match="bias has shape"):
        loss_per_token(p.hidden, p.weight, p.labels, settings, p.bias[:3])
    with pytest.raises(ValueError, match="the shard was described with 11"):
        loss_per_token(p.hidden, p.weight[:10], p.labels, settings)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


@pytest.mark.parametrize("factor", [1.0, 1 / 3, -2.0, float("inf"), 0.0])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_scaling_rounds_once(device, factor):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for to in (dtype, torch.float32):
            x = torch.randn(40_001, dtype=torch.float64).to(dtype).to(device)
            wide = torch.promote_types(dtype, torch.float32)
            number = torch.tensor(factor, dtype=wide, device=device)
            expected = (x.to(wide) * number).to(to)
            result = scaled(x, number, to)
            assert result.dtype == to
            assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
            assert (result.data_ptr() == x.data_ptr()) == (to == dtype)


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set")
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_scaling_kernel(factor):
    from megatron_ce_adaptor.chunked.scaling_kernels import scale_kernel

    n = random.Random(1).randrange(900, 1100)
    x = torch.randn(n)
    expected = x * torch.tensor(factor)
    scale_kernel[(3,)](x, torch.tensor([factor]), n, 128)
    assert torch.equal(x, expected)
