"""The same inputs through PyTorch's implementation: run by the Python that has torch, unsplit.

python torch_side.py FOLDER      reads FOLDER/inputs.npz, writes FOLDER/torch.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

OPTIONS: list[dict[str, Any]] = [
    {"reduction": "none", "weighted": False, "label_smoothing": 0.0},
    {"reduction": "none", "weighted": True, "label_smoothing": 0.1, "z_loss_weight": 0.01},
    {"reduction": "sum", "weighted": False, "label_smoothing": 0.1},
    {"reduction": "mean", "weighted": True, "label_smoothing": 0.0},
    {"reduction": "mean", "weighted": False, "label_smoothing": 0.2, "z_loss_weight": 1e-3},
]


def write_inputs(folder: Path) -> None:
    random = np.random.default_rng(42)
    labels = random.integers(0, 101, (3, 8))
    labels[0, :3] = -100
    np.savez(
        folder / "inputs.npz",
        logits=(random.standard_normal((3, 8, 101)) * 5).astype(np.float32),
        labels=labels,
        upstream=random.standard_normal((3, 8)).astype(np.float32),
        weight=(random.random(101) + 0.5).astype(np.float32),
    )


def main() -> None:
    import torch

    from megatron_ce_adaptor import loss_parallel_cross_entropy

    folder = Path(sys.argv[1])
    given = np.load(folder / "inputs.npz")
    labels, upstream, weight = (torch.from_numpy(given[name]) for name in ("labels", "upstream", "weight"))
    results = {}
    for index, options in enumerate(OPTIONS):
        options = dict(options)
        logits = torch.from_numpy(given["logits"]).requires_grad_()
        class_weight = weight if options.pop("weighted") else None
        loss = loss_parallel_cross_entropy(logits, labels, weight=class_weight, **options)
        seed = upstream if loss.dim() else upstream.reshape(-1)[0]
        loss.backward(seed)
        results[f"loss{index}"], results[f"gradient{index}"] = loss.detach().numpy(), logits.grad.numpy()
    np.savez(folder / "torch.npz", **results)


if __name__ == "__main__":
    main()
