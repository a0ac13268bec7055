"""A small language model on MindSpore whose output layer is split over tensor-parallel ranks, trained twice
from the same start: with the chunked loss, and with `loss_parallel_cross_entropy` on all logits. Prints both
losses each step.

    bash st_scripts/setup_mindspore.sh
    export PATH="$PWD/.venvs/mindspore/bin:$PATH" PYTHONPATH="$PWD"
    msrun --worker_num 2 --local_worker_num 2 --master_port 8118 --join True --bind_core False \
        examples/mindspore_tp_training.py --steps 20

Runs on the CPU with mccl; on Ascend say --device Ascend. The vocabulary of 50 is split unevenly on 4 ranks.
Exit status: 0 both losses fell and agree, 1 they did not, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank, init

from megatron_ce_adaptor.mindspore import ChunkedLossWrapper, CrossEntropyLoss, loss_parallel_cross_entropy

VOCABULARY, WIDTH, TOKENS = 50, 32, 64
TOLERANCE = 1e-4


class Model(nn.Cell):
    """Embedding, one hidden layer, and this rank's part of the output layer; the same weights on all
    ranks."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(0)

        def matrix(*shape: int) -> np.ndarray:
            return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

        full = -(-VOCABULARY // get_group_size())
        own = slice(min(VOCABULARY, get_rank() * full), min(VOCABULARY, (get_rank() + 1) * full))
        self.embedding = Parameter(Tensor(matrix(VOCABULARY, WIDTH)), name="embedding")
        self.inner = Parameter(Tensor(matrix(WIDTH, WIDTH)), name="inner")
        self.lm_head = mint.nn.Linear(WIDTH, own.stop - own.start, bias=False)
        self.lm_head.weight.set_data(Tensor(matrix(VOCABULARY, WIDTH)[own]))

    def construct(self, tokens: Tensor) -> Tensor:
        """One-hot tokens [N, V] to the hidden states [N, H], which lm_head makes this rank's logits of."""
        return ops.tanh(mint.matmul(mint.matmul(tokens, self.embedding), self.inner))


def train(steps: int, chunks: int) -> list[tuple[float, float]]:
    """(chunked loss, loss of all logits) of each step."""
    group = str(GlobalComm.WORLD_COMM_GROUP)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS)
    labels = (ids * 7 + 3) % VOCABULARY
    labels[::9] = -100  # tokens that do not count
    valid = int((labels != -100).sum())
    tokens, target = Tensor(np.eye(VOCABULARY, dtype=np.float32)[ids]), Tensor(labels)

    chunked, whole = Model(), Model()
    criterion = ChunkedLossWrapper(
        CrossEntropyLoss(tp_group=group, global_vocab_size=VOCABULARY, bare=True),
        num_chunks=chunks,
        reduce_hidden_gradient=True,
    ).set_lm_head(chunked.lm_head)

    def chunked_loss(x: Tensor) -> Tensor:
        return criterion(chunked(x), target, valid)

    def loss_of_all_logits(x: Tensor) -> Tensor:
        logits = mint.nn.functional.linear(copied_to_ranks(whole(x)), whole.lm_head.weight)
        return loss_parallel_cross_entropy(logits, target, group, VOCABULARY, reduction="mean")

    losses = []
    pairs = []
    for model, loss in ((chunked, chunked_loss), (whole, loss_of_all_logits)):
        parameters = list(model.trainable_params())
        pairs.append((ms.value_and_grad(loss, None, parameters), nn.Adam(parameters, learning_rate=0.02)))
    for _ in range(steps):
        values = []
        for compute, optimizer in pairs:
            value, gradients = compute(tokens)
            optimizer(gradients)
            values.append(float(value.asnumpy()))
        losses.append((values[0], values[1]))
    return losses


def copied_to_ranks(hidden: Tensor) -> Tensor:
    """Hidden states that meet another part of the vocabulary on each rank: their gradients are added up."""
    from mindspore.common._grad_function import _Function
    from mindspore.mint import distributed

    class Copy(_Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x + 0

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            gradient = gradient.contiguous()
            distributed.all_reduce(gradient)
            return gradient

    return Copy.apply(hidden)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--device", choices=("CPU", "Ascend"), default="CPU")
    options = parser.parse_args()
    if options.steps < 2 or options.chunks < 1:
        parser.error("--steps must be at least 2 and --chunks at least 1")
    ms.set_device(options.device)
    # on a CPU whose cores the ranks share, handing operators from thread to thread takes most of the time
    ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=options.device == "CPU")
    init("mccl" if options.device == "CPU" else "hccl")
    losses = train(options.steps, options.chunks)
    worst = max(abs(a - b) / b for a, b in losses)
    fell = all(last < 0.5 * first for first, last in zip(losses[0], losses[-1], strict=True))
    if get_rank() == 0:
        print(f"{'step':>4} {'chunked':>10} {'all logits':>11}")
        for step, (chunked, whole) in enumerate(losses, 1):
            print(f"{step:4} {chunked:10.6f} {whole:11.6f}")
        print(
            f"largest relative difference {worst:.1e}; the loss {'fell' if fell else 'DID NOT FALL'}",
            flush=True,
        )
    return 0 if fell and worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
