"""What needs no other rank: imports, one process, and the example as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dense
import mindspore as ms
import numpy as np
import pytest
import ranks
from mindspore import Tensor, mint, nn

from megatron_ce_adaptor.mindspore import (
    ChunkedLossWrapper,
    CrossEntropyLoss,
    gather_tensor_parallel_logits,
    loss_parallel_cross_entropy,
    parallel_cross_entropy,
    register_with_hyper_parallel,
    runtime,
)


def in_another_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=ranks.environment(**environment),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports() -> None:
    """The package needs no MindSpore and, with the Megatron hook in place, no torch; its MindSpore part no
    torch."""
    printed = in_another_process(
        "import sys\n"
        "import megatron_ce_adaptor\n"
        "assert 'mindspore' not in sys.modules\n"
        "import megatron_ce_adaptor.mindspore as door\n"
        "assert all(getattr(door, name) for name in door.__all__)\n"
        "names = [name for name in sys.modules if name.split('.')[0] == 'torch']\n"
        "ours = [name for name in sys.modules if name.startswith('megatron_ce_adaptor.') and '.mindspore' "
        "not in name]\n"
        "print(names, 'megatron_ce_adaptor.cross_entropy' in ours)",
        MCE_AUTO_PATCH="1",
    )
    assert printed.strip().splitlines()[-1] == "[] False"


@pytest.mark.parametrize("rows_of_a_block", [1, 4, 1000])
def test_blocks_of_rows(monkeypatch: pytest.MonkeyPatch, rows_of_a_block: int) -> None:
    """However the rows are cut, the same loss bit by bit, and the right gradient."""
    monkeypatch.setattr(runtime, "rows_of_a_block", lambda columns, on_cpu: rows_of_a_block)
    random = np.random.default_rng(0)
    logits, labels = random.standard_normal((10, 33)) * 4, random.integers(0, 33, 10)
    labels[4] = -100
    upstream = random.standard_normal(10)
    losses = []

    def scaled(x: Tensor) -> Tensor:
        losses.append(parallel_cross_entropy(x, Tensor(labels), 0.1, z_loss_weight=0.01))
        return (losses[0] * Tensor(upstream)).sum()

    gradient = ms.grad(scaled)(Tensor(logits))
    right = dense.dense_cross_entropy(logits, labels, upstream, label_smoothing=0.1, z_loss_weight=0.01)
    np.testing.assert_allclose(losses[0].asnumpy(), right.loss, rtol=1e-12)
    np.testing.assert_allclose(gradient.asnumpy(), right.gradient, rtol=1e-9, atol=1e-12)


def test_confident_tokens_keep_their_digits() -> None:
    """The label's logit far above the others: a tiny loss and the gradient at the label are right all the
    same, as far as MindSpore's fp32 exp on the CPU is (2e-5)."""
    logits = np.zeros((3, 1000), np.float32)
    logits[:, 7] = (12.0, 20.0, 40.0)
    labels = np.full(3, 7)
    loss = parallel_cross_entropy(Tensor(logits), Tensor(labels)).asnumpy()
    gradient = ms.grad(lambda x: parallel_cross_entropy(x, Tensor(labels)).sum())(Tensor(logits)).asnumpy()
    right = np.log1p(999 * np.exp(-logits[:, 7].astype(np.float64)))
    np.testing.assert_allclose(loss, right, rtol=4e-5)
    np.testing.assert_allclose(gradient[:, 7], np.expm1(-right), rtol=4e-5)


def test_unchecked_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """MCE_CHECK_LABELS=0: a label that is no class has the loss lse - max and the softmax as gradient."""
    monkeypatch.setenv("MCE_CHECK_LABELS", "0")
    logits = np.random.default_rng(1).standard_normal((2, 9)).astype(np.float32)
    labels = Tensor(np.array([3, 99]))
    loss = parallel_cross_entropy(Tensor(logits), labels).asnumpy()
    gradient = ms.grad(lambda x: parallel_cross_entropy(x, labels).sum())(Tensor(logits)).asnumpy()
    exponentials = np.exp(logits[1].astype(np.float64))
    assert loss[1] == pytest.approx(np.log(exponentials.sum()) - logits[1].max(), rel=1e-5)
    np.testing.assert_allclose(gradient[1], exponentials / exponentials.sum(), rtol=1e-5)


def test_empty_batch() -> None:
    logits, labels = Tensor(np.zeros((0, 5), np.float32)), Tensor(np.zeros(0, np.int64))
    loss, found = parallel_cross_entropy(logits, labels, return_statistics=True)
    assert loss.shape == (0,) and all(kind.shape == (0,) for kind in found)
    total, gradient = ms.value_and_grad(lambda x: loss_parallel_cross_entropy(x, labels, reduction="sum"))(
        logits
    )
    assert float(total.asnumpy()) == 0.0 and gradient.shape == (0, 5)


def test_layers_of_the_chunked_loss() -> None:
    """nn.Dense and mint.nn.Linear, tied weights, metrics beside the loss, and the inputs left as they
    were."""
    random = np.random.default_rng(2)
    hidden, labels = random.standard_normal((2, 5, 4)).astype(np.float32), random.integers(0, 6, (2, 5))
    layers = [nn.Dense(4, 6), mint.nn.Linear(4, 6)]
    for layer in layers:
        weight, bias = layer.weight.asnumpy().copy(), layer.bias.asnumpy().copy()
        criterion = ChunkedLossWrapper(CrossEntropyLoss(report_metrics=True), num_chunks=3).set_lm_head(layer)
        (loss, metrics), d_hidden = ms.value_and_grad(
            lambda x, c=criterion: c(x, Tensor(labels), 10), 0, has_aux=True
        )(Tensor(hidden))
        right = dense.dense_cross_entropy(
            (hidden @ weight.T + bias).reshape(10, 6).astype(np.float64), labels.reshape(-1), np.full(10, 0.1)
        )
        assert float(loss.asnumpy()) == pytest.approx(right.loss.mean(), rel=1e-5)
        assert float(metrics["entropy/mean"].asnumpy()) == pytest.approx(right.entropy.mean(), rel=1e-5)
        assert float(metrics["accuracy/mean"].asnumpy()) == pytest.approx(right.correct.mean())
        np.testing.assert_allclose(d_hidden.asnumpy().reshape(10, 4), right.gradient @ weight, atol=1e-6)
        np.testing.assert_array_equal(layer.weight.asnumpy(), weight)
    tied = ms.Parameter(Tensor(random.standard_normal((6, 4)), ms.float32), name="tied")
    layer = nn.Dense(4, 6, has_bias=False)
    criterion = ChunkedLossWrapper(CrossEntropyLoss(bare=True)).set_lm_head(layer, weight=tied)
    right = dense.dense_cross_entropy(
        (hidden @ tied.asnumpy().T).reshape(10, 6).astype(np.float64), labels.reshape(-1), np.ones(10)
    )
    assert float(criterion(Tensor(hidden), Tensor(labels)).asnumpy()) == pytest.approx(
        right.loss.sum(), rel=1e-5
    )


def test_numbers_beside_fp64_keep_their_digits() -> None:
    """MindSpore rounds a Python number beside an fp64 tensor to fp32; the losses do not."""
    random = np.random.default_rng(3)
    logits, labels = random.standard_normal((5, 9)), random.integers(0, 9, 5)
    right = dense.dense_cross_entropy(logits, labels, np.ones(5), z_loss_weight=1e-4)
    criterion = CrossEntropyLoss(z_loss_weight=1e-4, report_metrics=True)
    loss, metrics = criterion(Tensor(logits), Tensor(labels), 0.3)
    assert float(loss.asnumpy()) == pytest.approx(right.loss.sum() / 0.3, rel=1e-11)
    z_loss = 1e-4 * (right.lse**2).sum() / 0.3
    assert float(metrics["z_loss/mean"].asnumpy()) == pytest.approx(z_loss, rel=1e-11)


def test_parameters_gradients_are_rounded_once() -> None:
    """accumulation_dtype=float32: as many chunks as tokens give what one does, but for ties and the last bits
    of fp32."""
    random = np.random.default_rng(4)
    hidden, labels = Tensor(random.standard_normal((64, 8)), ms.bfloat16), Tensor(random.integers(0, 6, 64))
    head = mint.nn.Linear(8, 6, bias=False, dtype=ms.bfloat16)
    found = []
    for num_chunks in (1, 64):
        criterion = ChunkedLossWrapper(
            CrossEntropyLoss(bare=True), num_chunks, accumulation_dtype=ms.float32
        ).set_lm_head(head)
        (gradient,) = ms.grad(lambda x, c=criterion: c(x, labels), None, [head.weight])(hidden)
        found.append(gradient.astype(ms.float32).asnumpy())
    assert np.mean(found[0] == found[1]) > 0.9


def test_unsplit_gather_is_the_tensor_itself() -> None:
    logits = Tensor(np.ones((2, 3)), ms.float32)
    assert gather_tensor_parallel_logits(logits) is logits


def test_without_hyper_parallel() -> None:
    with pytest.raises(ImportError, match="no HyperParallel with loss_parallel for MindSpore was found"):
        register_with_hyper_parallel()


def test_example(tmp_path: Path) -> None:
    """As its head says, with msrun and 2 processes: both losses fall and agree."""
    folder = Path(sys.executable).parent
    done = subprocess.run(
        [
            str(folder / "msrun"), "--worker_num", "2", "--local_worker_num", "2", "--master_port",
            str(ranks.free_port()), "--log_dir", str(tmp_path), "--join", "True", "--bind_core", "False",
            str(ranks.REPOSITORY / "examples/mindspore_tp_training.py"), "--steps", "8",
        ],
        env=ranks.environment(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=ranks.JOB_LIMIT_S,
        check=False,
    )  # fmt: skip
    logs = "\n".join(log.read_text(errors="replace")[-3000:] for log in sorted(tmp_path.glob("worker_*.log")))
    assert "the loss fell" in logs, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert done.returncode == 0, logs
