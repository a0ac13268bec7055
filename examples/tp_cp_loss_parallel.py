#!/usr/bin/env python3
"""Train a small language model on a context-parallel x tensor-parallel mesh, on the CPU.

    torchrun --nproc-per-node 4 examples/tp_cp_loss_parallel.py [--cp 2] [--tp 2] [--steps 30] [--chunks 4]

The sequence is split over the mesh's first dimension (cp) and the vocabulary of the output layer over its
second (tp); the vocabulary's size is no multiple of tp. Training uses `ChunkedLossWrapper`, which never
holds the logits of more than a chunk of the tokens. Before each step the same loss is computed by
`F.cross_entropy` inside `loss_parallel`, and by a dense model, whole on each rank, that is trained beside.

Exit status: 0 all three agree at each step and the loss has fallen, 1 they do not, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_ce_adaptor import ChunkedLossWrapper, CrossEntropyLoss, loss_parallel

VOCAB, HIDDEN, BATCH, LENGTH = 251, 48, 4, 64
IGNORED = -100
ON_CP = 0  # mesh dimension
TOLERANCE = 1e-5


class LanguageModel(nn.Module):
    """Predicts a token from the one before. `forward` ends before the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return x + self.down(F.gelu(self.up(x)))


def split_vocabulary(model: LanguageModel, mesh: DeviceMesh) -> None:
    """The output layer's rows over tp; the other parameters stay plain, the same on every rank."""
    weight = distribute_tensor(model.lm_head.weight.data, mesh, [Replicate(), Shard(0)])
    model.lm_head.weight = nn.Parameter(weight)


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens, labels) [B, L]: each token follows from the one before; a fifth of the labels do not count."""
    tokens = [torch.randint(0, VOCAB, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((tokens[-1] * 7 + 3) % VOCAB)
    sequence = torch.stack(tokens, 1)
    labels = sequence[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORED
    return sequence[:, :-1].contiguous(), labels


def add_up_over_cp(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Each rank of cp has the gradient of its own tokens."""
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):  # Partial on cp
            parameter.grad = gradient.redistribute(mesh, parameter.placements)
        else:
            dist.all_reduce(gradient, group=mesh.get_group(ON_CP))


def train(mesh: DeviceMesh, steps: int, chunks: int) -> list[tuple[float, float, float]]:
    """Losses of each step: dense, loss_parallel, chunked."""
    torch.manual_seed(0)
    dense = LanguageModel()
    model = copy.deepcopy(dense)
    split_vocabulary(model, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=2.0) for m in (dense, model)]
    criterion = ChunkedLossWrapper(CrossEntropyLoss(), num_chunks=chunks).set_lm_head(model.lm_head)
    generator = torch.Generator().manual_seed(1)  # the same batches on all ranks
    losses = []
    for _ in range(steps):
        tokens, labels = batch(generator)
        valid = int((labels != IGNORED).sum())
        # this rank's part of every sequence, as rows of tokens
        own_tokens, own_labels = (
            x.chunk(mesh.size(ON_CP), 1)[mesh.get_local_rank(ON_CP)] for x in (tokens, labels)
        )
        on_mesh = [Shard(0), Replicate()]
        hidden = DTensor.from_local(model(own_tokens).flatten(0, 1), mesh, on_mesh, run_check=False)
        own_labels = DTensor.from_local(own_labels.flatten(), mesh, on_mesh, run_check=False)

        expected = F.cross_entropy(dense.lm_head(dense(tokens)).flatten(0, 1), labels.flatten())
        with torch.no_grad(), loss_parallel():
            logits = model.lm_head(hidden)  # [Shard(0), Shard(1)]
            inside = F.cross_entropy(logits, own_labels)
        loss, _ = criterion(hidden, own_labels, global_valid_tokens=valid)  # Partial on cp

        for optimizer, value in zip(optimizers, (expected, loss), strict=True):
            optimizer.zero_grad()
            value.backward()
        add_up_over_cp(model, mesh)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(
            (float(expected.detach()), float(inside.full_tensor()), float(loss.detach().full_tensor()))
        )
    return losses


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cp", type=int, default=2, help="ranks that the sequence is split over")
    parser.add_argument("--tp", type=int, default=2, help="ranks that the vocabulary is split over")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--chunks", type=int, default=4, help="of the tokens of a rank")
    options = parser.parse_args(arguments)
    for name in ("cp", "tp", "steps", "chunks"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, expected at least 1")
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if world != options.cp * options.tp:
        parser.error(
            f"--cp {options.cp} --tp {options.tp} needs {options.cp * options.tp} processes, and there are "
            f"{max(world, 1)}: start it with torchrun --nproc-per-node {options.cp * options.tp}"
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (options.cp, options.tp), mesh_dim_names=("cp", "tp"))
    losses = train(mesh, options.steps, options.chunks)
    worst = max(abs(x - dense) / dense for dense, *others in losses for x in others)
    fell = options.steps == 1 or losses[-1][0] < losses[0][0]
    if dist.get_rank() == 0:
        print(f"{'step':>4} {'dense':>10} {'loss_parallel':>14} {'chunked':>10}")
        for step, (dense, inside, chunked) in enumerate(losses, 1):
            print(f"{step:4} {dense:10.6f} {inside:14.6f} {chunked:10.6f}")
        verdict = "equal" if worst <= TOLERANCE else "NOT EQUAL"
        course = "fell" if fell else "DID NOT FALL"
        print(f"{verdict}: largest relative difference {worst:.1e}; the loss {course}")
    dist.destroy_process_group()
    return 0 if worst <= TOLERANCE and fell else 1


if __name__ == "__main__":
    sys.exit(main())
