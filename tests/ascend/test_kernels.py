"""The kernels for NPUs in Triton's interpreter, where they differ from the others.

The whole of tests/unit runs on them with TRITON_INTERPRET=1 MCE_TRITON_KERNELS=ascend.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from megatron_ce_adaptor.implementations import ascend_tiles, reference
from megatron_ce_adaptor.implementations.ascend_tiles import Options
from megatron_ce_adaptor.npu_check import shipped

interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]
OPTIONS: dict[str, Any] = {
    "label_smoothing": 0.1,
    "z_loss_weight": 0.01,
    "ignore_index": -100,
    "weights": None,
}


def kernels() -> Any:
    from megatron_ce_adaptor.implementations import ascend

    return ascend


def dense(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [rows, 3], labels, and the reference's loss and saved."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 3, generator=generator) * 3
    target = torch.randint(0, 3, (rows,), generator=generator)
    target[5] = -100
    loss, saved, _ = reference.forward(logits, target, total_columns=3, statistics=False, **OPTIONS)
    return logits, target, loss, saved


class TestInterpreted:
    pytestmark = interpreted

    @pytest.mark.parametrize("statistics", [False, True])
    def test_payload_is_the_references(self, statistics: bool) -> None:
        """Ranks with either implementation could be merged by either: same rows, same header."""
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(6, 70_001, generator=generator)
        target = torch.tensor([0, 70_000, 35_000, 100_000, -100, 8192])  # the fourth is another shard's
        options = {"first_column": 0, "ignore_index": -100, "smooth": True, "statistics": statistics}
        payload = kernels().row_statistics(logits, target, weights=None, **options)
        expected = reference.row_statistics(logits, target, weights=None, **options)
        assert payload.shape == expected.shape
        assert payload[-4:].tolist() == [1.0, 70_001 - 65_536, 0.0, 0.0] == expected[-4:].tolist()
        merged = [
            module.merge(
                p[None], target, total_columns=140_002, statistics=statistics, equal_shards=True, **OPTIONS
            )
            for module, p in ((kernels(), payload), (kernels(), expected), (reference, payload))
        ]
        for loss, saved, _ in merged[1:]:
            torch.testing.assert_close(loss, merged[0][0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(saved, merged[0][1], rtol=1e-5, atol=1e-5)

    def test_more_rows_than_programs(self) -> None:
        """HAZARDS 29: every program loops over rows; `test_routing` has the 70000 rows of the launch."""
        logits, target, expected, expected_saved = dense(90)
        common = {**OPTIONS, "statistics": False, "total_columns": 3}
        loss, saved, _ = kernels().forward(logits, target, **common)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(saved, expected_saved, rtol=1e-5, atol=1e-5)

    def test_merging_70000_rows(self) -> None:
        """More blocks of rows than programs, and a last one that is not full."""
        logits, target, expected, expected_saved = dense(70_000)
        payload = reference.row_statistics(
            logits, target, first_column=0, ignore_index=-100, smooth=True, statistics=False, weights=None
        )
        loss, saved, _ = kernels().merge(
            payload[None], target, total_columns=3, statistics=False, equal_shards=False, **OPTIONS
        )
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(saved, expected_saved, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("column_stride", [1, 2**22 - 1])
    def test_offsets_beyond_2_to_the_31(self, column_stride: int) -> None:
        """HAZARDS 27: rows, and columns of a transposed matrix, whose offset needs 64 bits. The memory is
        reserved, not used."""
        columns = 3 if column_stride == 1 else 600
        far = torch.empty(2**31 + 2**29, dtype=torch.float16)
        logits = far.as_strided((2, columns), (2**31 + 64 if column_stride == 1 else 1, column_stride))
        logits.copy_(torch.randn(2, columns, generator=torch.Generator().manual_seed(3)))
        target = torch.tensor([columns - 1, columns - 1])
        options = {**OPTIONS, "total_columns": columns}
        loss, saved, _ = kernels().forward(logits, target, statistics=False, **options)
        expected, _, _ = reference.forward(logits, target, statistics=False, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        close = logits.clone(memory_format=torch.contiguous_format)
        wanted = torch.empty_like(close)
        reference.gradient(close, target, saved, torch.ones(2), wanted, first_column=0, **options)
        kernels().gradient(logits, target, saved, torch.ones(2), logits, first_column=0, **options)
        torch.testing.assert_close(logits.clone(memory_format=torch.contiguous_format), wanted)

    @pytest.mark.parametrize("label", [0, 1023, 1024, 1025, 2047, 2048, 4095, 4096, 4999])
    def test_targets_at_the_edges_of_tiles(self, label: int) -> None:
        """The two ranges beside the target's column: empty, a whole number of tiles, one more, one less."""
        generator = torch.Generator().manual_seed(label)
        for columns in (label + 1, 5000):
            logits = torch.randn(1, columns, generator=generator) * 3
            target = torch.tensor([label])
            options = {**OPTIONS, "total_columns": columns}
            loss, saved, _ = kernels().forward(logits, target, statistics=False, **options)
            expected, expected_saved, _ = reference.forward(logits, target, statistics=False, **options)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(saved, expected_saved, rtol=1e-5, atol=1e-5)

    def test_what_cannot_be_computed_is_said(self) -> None:
        options = {**OPTIONS, "statistics": False}
        target = torch.tensor([0])
        with pytest.raises(TypeError, match="no fp64"):
            kernels().forward(torch.zeros(1, 2, dtype=torch.float64), target, total_columns=2, **options)
        with pytest.raises(ValueError, match=str(2**24)):
            kernels().forward(torch.zeros(1, 2), target, total_columns=2**24, **options)
        far = torch.empty(2**22 + 1).as_strided((1, 2), (1, 2**22))
        with pytest.raises(ValueError, match=r"4194304 elements apart.*contiguous"):
            kernels().forward(far, target, total_columns=2, **options)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not compiled")
def test_todays_triton_compiles_the_kernels_too() -> None:
    """For a GPU, since it has no NPUs: the source serves both versions of the language."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megatron_ce_adaptor.implementations import ascend_kernels

    for case in {c.kernel: c for c in shipped.cases() if c.tile <= 1024 and c.dtype != "fp16"}.values():
        kernel = getattr(ascend_kernels, case.kernel)
        types = {p.name: "constexpr" if p.is_constexpr else case.types[p.name] for p in kernel.params}
        constants = {(p.num,): case.constants[p.name] for p in kernel.params if p.is_constexpr}
        assert compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_tile_that_is_launched_is_compiled_by_the_gate(itemsize: int) -> None:
    """HAZARDS 30: for any number of columns and any options the launch code's tile is one of npu-check's."""
    dtype = "bf16" if itemsize == 2 else "fp32"
    shared = {(c.kernel, c.dtype, c.rows, c.tile) for c in shipped.cases()}
    checked = {(c.kernel, c.dtype, c.tile, c.constants.get("STRIDED")) for c in shipped.cases()}
    every = {c.name for c in shipped.cases(every=True)}
    assert {c.name for c in shipped.cases()} <= every
    for columns in {2**k + d for k in range(22) for d in (-1, 0, 1)} - {0}:
        for flags in itertools.product((False, True), repeat=4):
            options = Options(*flags)
            if options.weighted and not options.smooth:
                continue
            tile = ascend_tiles.statistics_tile(columns, itemsize, options)
            assert ("row_statistics_kernel", dtype, tile, options.strided) in checked
            assert shipped._name("row_statistics", dtype, tile, **options._asdict()) in every
            tile = ascend_tiles.gradient_tile(columns, options)
            assert ("gradient_kernel", dtype, tile, options.strided) in checked
        short = ascend_tiles.short_tile(columns)
        if columns <= ascend_tiles.MOST_SHORT_STATISTICS:
            assert short.columns >= columns
            assert ("short_row_statistics_kernel", dtype, *short) in shared
        if columns <= ascend_tiles.MOST_SHORT_GRADIENT:
            assert ("short_row_gradient_kernel", dtype, *short) in shared
