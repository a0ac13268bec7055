"""An estimate of what a row costs on a vector core, from the program that the compiler made.

The unit is about a cycle, and the weights below are taken from public figures of the 910B (a vector unit of
256 bytes a cycle, 1.6 TB/s shared by 40 cores at 1.85 GHz) or guessed (waits, exponentials); none was
measured. So the number says whether one form of a kernel is better than another, and that a change made it
worse, but not how long it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_ce_adaptor.npu_check.hivm import Block, Instruction, Program

_GM_BYTES_PER_CYCLE = 22.0
_COPY_START = 64.0
_VECTOR_BYTES_PER_CYCLE = 256.0
_VECTOR_START = 16.0
# of instructions that take more than one pass over their operand
_PASSES = {"exp": 4.0, "ln": 4.0, "log": 4.0, "div": 4.0, "reduce": 2.0, "sel": 2.0}
# The scalar unit stops until the vector unit or a copy is done, and the other way round.
_WAIT_WITH_SCALAR = 40.0
_WAIT = 10.0
_BARRIER = 10.0
_SCALAR = 4.0
# An operation that became a loop over single elements of UB.
_ELEMENT = 30.0


class Cost(NamedTuple):
    """Cycles of copies, and of everything that happens one after the other with the vector unit."""

    copies: float = 0.0
    compute: float = 0.0

    def plus(self, other: Cost, times: float = 1.0) -> Cost:
        return Cost(self.copies + times * other.copies, self.compute + times * other.compute)

    def cycles(self, overlap: bool) -> float:
        """Copies run beside the computation where buffers alternate, but not all of them: a quarter of the
        smaller part stays visible, so that no part can grow unseen."""
        if not overlap:
            return self.copies + self.compute
        return max(self.copies, self.compute) + min(self.copies, self.compute) / 4


def cost_of_row(program: Program, trips: Sequence[float], rows: int = 1) -> float:
    """Cycles per row.

    Args:
        trips: how often the loops inside of the loop over rows run, in their order.
        rows: rows in one trip of the outer loop.
    """
    outer = program.function.loops()
    if not outer:
        return round(_of_block(program.function, iter(trips)).cycles(bool(program.double_buffered)), 1)
    total = _of_block(outer[0], iter(trips))
    cycles = total.cycles(bool(program.double_buffered))
    if program.scalar_loops:
        largest = max((i.elements for i in outer[0].walk()), default=1)
        cycles += _ELEMENT * largest * program.scalar_loops
    return round(cycles / rows, 1)


def _of_block(block: Block, trips: Iterator[float]) -> Cost:
    total = Cost()
    for position, item in enumerate(block.body):
        if isinstance(item, Instruction):
            total = total.plus(_of_instruction(item))
        elif item.kind == "loop":
            times = next(trips, 1.0)
            total = total.plus(_of_block(item, trips), times)
        elif item.kind == "else":
            continue
        else:
            following = block.body[position + 1 : position + 2]
            branches = [_of_block(item, trips)]
            branches += [_of_block(b, trips) for b in following if isinstance(b, Block) and b.kind == "else"]
            total = total.plus(max(branches, key=lambda cost: cost.copies + cost.compute))
    return total


def _of_instruction(instruction: Instruction) -> Cost:
    if instruction.kind in ("load", "store"):
        return Cost(copies=_COPY_START + instruction.size / _GM_BYTES_PER_CYCLE)
    if instruction.kind == "vector":
        passes = max((p for key, p in _PASSES.items() if key in instruction.name), default=1.0)
        return Cost(compute=_VECTOR_START + passes * instruction.size / _VECTOR_BYTES_PER_CYCLE)
    if instruction.kind == "wait":
        return Cost(compute=_WAIT_WITH_SCALAR if "S" in instruction.name.split(">") else _WAIT)
    if instruction.kind == "barrier":
        return Cost(compute=_BARRIER)
    return Cost(compute=_SCALAR) if instruction.kind == "scalar" else Cost()
