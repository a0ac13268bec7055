"""What is read from the compiler's output, and the estimate from it, on a small program of our own."""

from __future__ import annotations

import pytest

from megatron_ce_adaptor.npu_check import hivm
from megatron_ce_adaptor.npu_check.cost import cost_of_row

# A loop over rows with one over tiles: a double-buffered load, exponentials, a store, a wait of S for V.
PROGRAM = """
module attributes {dlti = "UB_SIZE", 1572864 : i32, "VECTOR_CORE_COUNT", 40 : i32} {
  func.func @kernel_infer_task_type_function() -> i8 {
    return %c10_i8 : i8
  }
  func.func private @vexp_1d_float(memref<?xf32@UB>)
  func.func @kernel(%arg0: memref<?xbf16@GM>) {
    %0 = hivm.hir.pointer_cast(%c0_i64) : memref<1024xf32@UB>
    %1 = hivm.hir.pointer_cast(%c4096_i64) : memref<1024xf32@UB>
    scf.for %arg1 = %a to %b step %c : i32 {
      scf.for %arg2 = %a to %b step %c : i32 {
        %2 = arith.select %x, %1, %0 : memref<1024xf32@UB>
        %view = memref.subview %2[0] [%n] [1] : memref<1024xf32@UB> to memref<?xf32@UB>
        scf.if %tail {
          hivm.hir.vbrc ins(%cst : f32) outs(%2 : memref<1024xf32@UB>)
        } {hivm.unlikely_condition}
        hivm.hir.load ins(%gm : memref<?xf32@GM>) outs(%view : memref<?xf32@UB>)
        hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
        %cast = memref.cast %2 : memref<1024xf32@UB> to memref<?xf32@UB>
        func.call @vexp_1d_float(%cast) : (memref<?xf32@UB>) -> ()
        hivm.hir.wait_flag[<PIPE_V>, <PIPE_S>, <EVENT_ID0>]
        hivm.hir.store ins(%2 : memref<1024xf32@UB>) outs(%gm : memref<?xf32@GM>)
      }
      hivm.hir.pipe_barrier[<PIPE_MTE3>]
      %3 = hivm.hir.pointer_cast(%c8192_i64) : memref<1xf32@UB>
      hivm.hir.store ins(%3 : memref<1xf32@UB>) outs(%gm : memref<?xf32@GM>)
    }
    return
  }
}
""".replace("@UB", ", #hivm.address_space<ub>").replace("@GM", ", #hivm.address_space<gm>")


def test_memory_loops_and_waits() -> None:
    program = hivm.parse(PROGRAM)
    assert (program.ub_used, program.ub_total, program.vector_cores) == (8196, 196608, 40)
    assert program.double_buffered is True
    assert program.waits == 2
    assert program.scalar_loops == 0
    assert program.called == {"vexp_1d_float"}
    assert not program.inline_assembly
    assert program.last_store_waits
    (tiles,) = program.tile_loops
    assert [(i.kind, i.elements) for i in tiles.walk() if i.kind in ("load", "store", "vector")] == [
        ("vector", 1024),
        ("load", 1024),
        ("vector", 1024),
        ("store", 1024),
    ]


def test_a_load_to_one_place_is_not_double_buffered() -> None:
    program = hivm.parse(PROGRAM.replace("arith.select %x, %1, %0", "memref.cast %0"))
    assert program.double_buffered is False


def test_a_program_without_a_load_in_a_loop_says_so() -> None:
    lines = [line for line in PROGRAM.splitlines() if "hir.load" not in line]
    assert hivm.parse("\n".join(lines)).double_buffered is None


def test_a_store_that_may_overtake_is_seen() -> None:
    assert not hivm.parse(PROGRAM.replace("hivm.hir.pipe_barrier[<PIPE_MTE3>]", "")).last_store_waits


def test_loops_over_single_elements_are_counted() -> None:
    element = "%9 = memref.load %2[%arg2] : memref<1024xf32, #hivm.address_space<ub>>\n        "
    program = hivm.parse(
        PROGRAM.replace("hivm.hir.wait_flag[<PIPE_V>", element + "hivm.hir.wait_flag[<PIPE_V>")
    )
    assert program.scalar_loops == 1
    assert cost_of_row(program, [4]) > cost_of_row(hivm.parse(PROGRAM), [4]) + 10_000


def test_inline_assembly_is_seen() -> None:
    assert hivm.parse(PROGRAM + "llvm.inline_asm").inline_assembly


@pytest.mark.parametrize(
    ("text", "replacement"),
    [
        (
            "hivm.hir.wait_flag[<PIPE_V>, <PIPE_S>, <EVENT_ID0>]",
            "hivm.hir.wait_flag[<PIPE_V>, <PIPE_S>, <E>]\n" * 9,
        ),
        ("arith.select %x, %1, %0", "memref.cast %0"),
        ("1024xf32", "4096xf32"),
    ],
    ids=["more waits", "no double buffering", "wider tiles"],
)
def test_cost_rises_with_what_is_bad(text: str, replacement: str) -> None:
    assert cost_of_row(hivm.parse(PROGRAM.replace(text, replacement)), [8]) > cost_of_row(
        hivm.parse(PROGRAM), [8]
    )


def test_cost_is_by_row_and_by_trip() -> None:
    program = hivm.parse(PROGRAM)
    assert cost_of_row(program, [8]) > 1.5 * cost_of_row(program, [4])
    assert cost_of_row(program, [8], rows=8) == pytest.approx(cost_of_row(program, [8]) / 8, rel=0.01)
