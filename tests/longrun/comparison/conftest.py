"""Logs for these tests.

They are generated in the form that Megatron-Core 0.16 to 0.19 documents by its printing code (`training_log`,
`report_memory`, `_print_args`); no line is copied from a run. `native_excerpt.log` and `te_excerpt.log`
beside this file were written by the same generator and are kept: a change of the generator cannot hide one
of the parser.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ARGUMENTS = {
    "bf16": "True",
    "cross_entropy_fusion_impl": "native",
    "cross_entropy_loss_fusion": "True",
    "data_parallel_size": "2",
    "data_path": "['/somewhere/data/enwiki_text_document']",
    "global_batch_size": "4",
    "hidden_size": "64",
    "log_interval": "1",
    "lr": "0.001",
    "micro_batch_size": "1",
    "num_experts": "4",
    "num_layers": "2",
    "pipeline_model_parallel_size": "2",
    "save": "/somewhere/native/checkpoints",
    "seq_length": "64",
    "tensor_model_parallel_size": "2",
    "tokenizer_model": "/somewhere/tokenizer",
    "train_iters": "20",
    "world_size": "8",
}


def loss_at(step: int) -> float:
    """A loss curve that falls from about 8.3, the logarithm of a vocabulary of 4000."""
    return 4.0 + 4.3 * math.exp(-step / 60) + 0.05 * random.Random(step).random()


@dataclass
class LogMaker:
    """Writes one run's log. `factor` multiplies its losses: 1.001 makes a curve 0.1 % above the other."""

    impl: str = "native"
    steps: int = 20
    announced: int | None = None
    factor: float = 1.0
    norm_factor: float = 1.0
    time_ms: float = 180.0
    memory: Sequence[float] = (2000.0, 2000.0, 2300.0, 2300.0)
    micro_batches: int = 2
    arguments: dict[str, str] = field(default_factory=dict)
    loss: Callable[[int], float] = loss_at

    def argument_lines(self) -> list[str]:
        values = {**ARGUMENTS, "train_iters": str(self.announced or self.steps)}
        values |= {"cross_entropy_fusion_impl": self.impl, "save": f"/somewhere/{self.impl}/checkpoints"}
        values |= self.arguments
        dump = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
        rule = "-" * 24
        return [f"{rule} arguments {rule}", *dump, f"{'-' * 20} end of arguments {'-' * 21}"]

    def step_line(self, step: int, *, skipped: int = 0, nan: bool = False, norm: float | None = None) -> str:
        loss = 0.0 if skipped else self.loss(step) * self.factor
        noise = random.Random(self.impl + str(step)).gauss(0, 3)
        elapsed = self.time_ms + noise + (20_000 if step == 1 else 0)
        norm = (1.5 + 0.2 * math.sin(step / 3)) * self.norm_factor if norm is None else norm
        lr = 1e-3 * min(1.0, step / 10)
        line = f" [2026-07-01 12:{step // 60 % 60:02d}:{step % 60:02d}.123456]"
        line += f" iteration {step:8d}/{self.announced or self.steps:8d} |"
        line += f" consumed samples: {4 * step:12d} |"
        line += f" elapsed time per iteration (ms): {elapsed:.1f} |"
        line += f" learning rate: {lr:.6E} | global batch size: {4:5d} |"
        line += "" if nan else f" lm loss: {loss:.6E} |"  # Megatron leaves out what is not >= 0
        line += " load_balancing_loss: 1.041994E+00 |"
        line += f" loss scale: 1.0 | grad norm: {norm:.3f} |"
        return line + f" number of skipped iterations: {skipped:3d} | number of nan iterations: {0:3d} |"

    def memory_lines(self, iteration: int) -> list[str]:
        return [
            f"[Rank {rank}] (after {iteration} iterations) memory (MB) | allocated: {peak / 2:.2f} |"
            f" max allocated: {peak:.2f} | reserved: {peak * 1.2:.2f} | max reserved: {peak * 1.2:.2f}"
            for rank, peak in zip((0, 1, 4, 5), self.memory, strict=False)
        ]

    def exit_lines(self) -> list[str]:
        lines = []
        for rank in range(8):
            calls = self.steps * self.micro_batches if rank >= 4 else 0
            te, native = (calls, 0) if self.impl == "te" else (0, calls)
            counts = f"te {te} calls, native {native} calls"
            lines.append(f"[rank {rank}] cross entropy: {counts}, implementation reference")
        return lines

    def lines(self) -> list[str]:
        lines = [
            "using world size: 8, data-parallel size: 2",
            *self.argument_lines(),
            "> building train dataset ...",
        ]
        for step in range(1, self.steps + 1):
            lines.append(self.step_line(step))
            if step <= 2:
                lines += self.memory_lines(step)
        return [*lines, "[after training is done] datetime: 2026-07-01 12:30:00.000000 ", *self.exit_lines()]

    def text(self) -> str:
        return "\n".join(self.lines()) + "\n"

    def write(self, folder: Path, name: str | None = None) -> Path:
        path = folder / (name or f"{self.impl}.log")
        path.write_text(self.text())
        return path


@pytest.fixture
def maker() -> type[LogMaker]:
    return LogMaker


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Logs of a native and a te run whose losses differ by 0.1 %."""
    return LogMaker().write(tmp_path), LogMaker("te", factor=1.001, norm_factor=1.01, time_ms=170).write(
        tmp_path
    )


@pytest.fixture
def real_png() -> None:
    """Asked for by the tests that look at report.png; the others do without drawing it (a second each)."""


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_png" not in request.fixturenames and importlib.util.find_spec("matplotlib"):
        from megatron_ce_adaptor.longrun import report_png

        monkeypatch.setattr(report_png, "render_png", lambda metrics: b"\x89PNG" + bytes(2000))


def write_status(folder: Path, run: str, **changes: object) -> None:
    content = {
        "implementation": run,
        "exit_code": 0,
        "steps": 20,
        "complete": True,
        "world_size": 8,
        "last_stage_ranks": [4, 5, 6, 7],
        "micro_batches_per_step": 2,
        "sequence_length": 64,
        "global_batch_size": 4,
        "message": "",
    }
    (folder / f"{run}.status.json").write_text(json.dumps({**content, **changes}))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder as the launcher leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    LogMaker().write(folder)
    LogMaker("te", factor=1.001, norm_factor=1.01, time_ms=170).write(folder)
    for run in ("native", "te"):
        write_status(folder, run)
    (folder / "env.json").write_text(json.dumps({"python": "3.12.1", "packages": {"torch": "2.11.0"}}))
    return folder


@pytest.fixture
def status() -> Callable[..., None]:
    return write_status
