"""Reads HIVM, the last program that bishengir-compile prints before CANN takes over: buffers have addresses
in the local memory (UB) of a vector core, pipes are synchronised by flags, and everything is an instruction
or a call of the vendor's library of vector instructions.

Pipes: MTE2 copies from global memory (GM) into UB, MTE3 back, V computes on tiles, S is the scalar unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_BITS = {
    "i1": 1,
    "i8": 8,
    "i16": 16,
    "i32": 32,
    "i64": 64,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "index": 64,
}
_TYPE = re.compile(r"memref<((?:[0-9?]+x)*)(i1|i8|i16|i32|i64|f16|bf16|f32|f64|index)\b")
_NAME = re.compile(r"%[\w#]+")
_ASSIGNED = re.compile(r"(%[\w#]+)(?::\d+)? = (.*)")
_WAIT = re.compile(r"hivm\.hir\.(set|wait)_flag\[<PIPE_(\w+)>, <PIPE_(\w+)>, (\S+?)\]")
# a load or store of one element of a buffer in UB, at a place that varies
_ELEMENTWISE = re.compile(
    r"memref\.(?:load|store) [^\n]*%\w+\[%(?!c\d+)\w+[^\]]*\] ?(?:\{[^}]*\} ?)?"
    r": memref<(?!1x)[^\n]*address_space<ub>"
)


@dataclass(frozen=True)
class Buffer:
    """What is known of a memref: elements, bytes, whether it lies in UB and in one of two places in turn."""

    elements: int
    size: int
    in_ub: bool
    alternates: bool = False


@dataclass(frozen=True)
class Instruction:
    """kind: load, store, vector, wait, barrier or scalar; name: of the instruction, or the two pipes of a
    wait.
    """

    kind: str
    name: str
    elements: int = 0
    size: int = 0
    alternates: bool = False
    text: str = ""


@dataclass
class Block:
    """Instructions and blocks in their order; kind: function, loop, if, or else."""

    kind: str
    body: list[Instruction | Block] = field(default_factory=list)
    unlikely: bool = False

    def walk(self) -> Iterator[Instruction]:
        """All instructions inside."""
        for item in self.body:
            if isinstance(item, Block):
                yield from item.walk()
            else:
                yield item

    def loops(self) -> list[Block]:
        """The outermost loops inside."""
        found: list[Block] = []
        for item in self.body:
            if isinstance(item, Block):
                found += [item] if item.kind == "loop" else item.loops()
        return found


@dataclass(frozen=True)
class Program:
    """What the compiler made of a kernel."""

    function: Block
    ub_used: int
    ub_total: int
    vector_cores: int
    scalar_loops: int
    called: frozenset[str]
    inline_assembly: bool

    @property
    def tile_loops(self) -> list[Block]:
        """The loops inside of the loop over rows, or that loop if it has none inside."""
        outer = self.function.loops()
        inner = [loop for row in outer for loop in row.loops()]
        return inner or outer

    @property
    def waits(self) -> int:
        return sum(i.kind == "wait" for i in self.function.walk())

    @property
    def double_buffered(self) -> bool | None:
        """Every tile loaded in a loop over tiles goes to one of two places in turn; None: no such load."""
        loads = [i for loop in self.tile_loops for i in loop.walk() if i.kind == "load" and i.elements > 1]
        return all(i.alternates for i in loads) if loads else None

    @property
    def last_store_waits(self) -> bool:
        """Nothing that was stored earlier can arrive in GM after what is stored last."""
        block = _block_of_last_store(self.function)
        stores = [k for k, item in enumerate(block) if isinstance(item, Instruction) and item.kind == "store"]
        for item in reversed(block[: stores[-1]] if stores else []):
            if isinstance(item, Block) or item.kind == "store":
                return False
            if item.kind == "barrier" and item.name in ("MTE3", "ALL"):
                return True
        return False


def _block_of_last_store(block: Block) -> list[Instruction | Block]:
    for item in reversed(block.body):
        if isinstance(item, Block):
            found = _block_of_last_store(item)
            if found:
                return found
        elif item.kind == "store":
            return block.body
    return []


def parse(text: str) -> Program:
    """Reads `module.hivm.opt.mlir`."""
    return Program(
        function=_Reader(text).function,
        ub_used=_peak_of_ub(text),
        ub_total=_attribute(text, "UB_SIZE") // 8,
        vector_cores=_attribute(text, "VECTOR_CORE_COUNT"),
        scalar_loops=len(_ELEMENTWISE.findall(text)),
        called=frozenset(re.findall(r"func\.func private @(\w+)\(", text)),
        inline_assembly="inline_asm" in text,
    )


def _attribute(text: str, name: str) -> int:
    found = re.search(rf'"{name}", (\d+)', text)
    return int(found.group(1)) if found else 0


def _buffer_of_type(text: str) -> Buffer | None:
    found = _TYPE.search(text)
    if found is None:
        return None
    elements = 1
    for dimension in filter(None, found.group(1).split("x")):
        elements *= 0 if dimension == "?" else int(dimension)
    in_ub = "address_space<ub>" in text[found.start() :]
    return Buffer(elements, (elements * _BITS[found.group(2)] + 7) // 8, in_ub)


def _peak_of_ub(text: str) -> int:
    """The end of the highest buffer; addresses are constants named by their value."""
    peak = 0
    for found in re.finditer(r"hivm\.hir\.pointer_cast\(([^)]*)\)(?:\s*\[[^\]]*\])? : (memref<[^\n]*)", text):
        buffer = _buffer_of_type(found.group(2))
        if buffer is not None and buffer.in_ub:
            for address in re.findall(r"%c(\d+)_i64", found.group(1)):
                peak = max(peak, int(address) + buffer.size)
    return peak


class _Reader:
    """One pass over the lines of the kernel's function, following braces and names."""

    def __init__(self, text: str) -> None:
        self.function = Block("function")
        self._open = [self.function]
        self._buffers: dict[str, Buffer] = {}
        inside = False
        for line in (raw.strip() for raw in text.splitlines()):
            if not inside:
                # the helper that tells the host which cores a kernel needs is a function too
                inside = line.startswith("func.func @") and "infer_task_type" not in line
                continue
            if len(self._open) == 1 and line == "}":
                break
            self._read(line)

    def _read(self, line: str) -> None:
        if line.startswith("}"):
            closed = self._open.pop()
            closed.unlikely = "unlikely" in line
            if line.startswith("} else {"):
                self._enter(Block("else"))
            return
        if line.endswith("{"):
            self._enter(Block("loop" if re.search(r"scf\.(for|while)\b", line) else "if"))
            return
        self._note_buffer(line)
        instruction = self._instruction(line)
        if instruction is not None:
            self._open[-1].body.append(instruction)

    def _enter(self, block: Block) -> None:
        self._open[-1].body.append(block)
        self._open.append(block)

    def _note_buffer(self, line: str) -> None:
        assigned = _ASSIGNED.match(line)
        if assigned is None or "memref<" not in line:
            return
        name, value = assigned.groups()
        sources = [self._buffers[n] for n in _NAME.findall(value) if n in self._buffers]
        if value.startswith("hivm.hir.pointer_cast"):
            buffer = _buffer_of_type(value)
        elif sources:  # a view: as large as what it is taken from, which bounds it
            buffer = sources[0]
            if value.startswith("arith.select"):
                buffer = Buffer(buffer.elements, buffer.size, buffer.in_ub, alternates=True)
        else:
            buffer = None
        if buffer is not None:
            self._buffers[name] = buffer
        else:
            self._buffers.pop(name, None)  # names are used again in other blocks

    def _instruction(self, line: str) -> Instruction | None:
        flag = _WAIT.match(line)
        if flag is not None:
            kind = "wait" if flag.group(1) == "wait" else "flag"
            return Instruction(kind, f"{flag.group(2)}>{flag.group(3)}", text=flag.group(4))
        if "hivm.hir.pipe_barrier" in line:
            return Instruction("barrier", line.split("PIPE_")[1].split(">")[0])
        name = re.search(r"call @(\w+)\(", line) or re.match(r"hivm\.hir\.(v\w+|load|store|copy)\b", line)
        if name is not None:
            return self._operation(name.group(1), line)
        scalar = re.match(r"(?:%\w+ = )?memref\.(load|store)\b", line)
        return None if scalar is None else Instruction("scalar", scalar.group(1), 1)

    def _operation(self, name: str, line: str) -> Instruction:
        operands = [self._buffers[n] for n in _NAME.findall(line) if n in self._buffers]
        local = [b for b in operands if b.in_ub]
        largest = max(local, key=lambda b: b.size, default=Buffer(1, 1, True))
        kind = "vector"
        if name == "load" or "gm_to_ub" in name:
            kind = "load"
        elif name == "store" or "ubuf_to_gm" in name:
            kind = "store"
        return Instruction(kind, name, largest.elements, largest.size, any(b.alternates for b in local))
