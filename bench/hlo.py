"""What every kernel of a compiled GPU program reads and writes, out of its optimised HLO.

Bytes come from shapes, walked back from the root of a fusion: a slice, a dynamic slice or a gather counts what it
takes; a scatter or a dynamic update that is the root counts the update alone (it is in place). An operand that an
output aliases is read and written. What depends on data (pages, block tables, partial results) the caller says, as
:class:`Traffic` by kernel and shape. Caches are left out: what is read twice by one kernel counts once.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.common import BenchError

ITEM_BYTES = {"pred": 1.0, "bf16": 2.0, "f16": 2.0, "f32": 4.0, "f64": 8.0}
ITEM_BYTES |= {f"{sign}{bits}": bits / 8 for sign in "su" for bits in (2, 4, 8, 16, 32, 64)}
ITEM_BYTES |= {"f8e4m3fn": 1.0, "f8e5m2": 1.0}
NOT_KERNELS = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
CONTROL_FLOW = {"while", "conditional"}
_ARRAY = re.compile(r"\b(pred|bf16|f8\w+|[sufc]\d+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ((?:\((?:[^()]|\([^()]*\))*\))|\S+) ([\w\-]+)\((.*)$")


class Shape(NamedTuple):
    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> float:
        """
        Raises:
            BenchError: the dtype is not known here.
        """
        if self.dtype not in ITEM_BYTES:
            raise BenchError(f"the compiled program has an array of dtype {self.dtype}, which the audit doesn't know")
        return self.size * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """``operands`` are names; of a parameter, its number."""

    name: str
    shapes: tuple[Shape, ...]
    op: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def size(self) -> int:
        return sum(shape.size for shape in self.shapes)

    @property
    def nbytes(self) -> float:
        return sum(shape.nbytes for shape in self.shapes)

    def attribute(self, pattern: str) -> str:
        """First group of a pattern in the attributes, or nothing."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else ""


class Traffic(NamedTuple):
    """What kernels of a name really read and write of operands or results of a shape."""

    kernel: str
    dims: tuple[int, ...]
    read: float
    written: float


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch. ``name`` says what it is: of ours its own name, of a product or a fusion what it consists of."""

    name: str
    outputs: tuple[Shape, ...]
    read: float
    written: float


class Program(NamedTuple):
    kernels: list[Kernel]
    control_flow: list[str]
    """Names of loops and branches, which the host would have to wait for."""


def parse(text: str, traffic: Sequence[Traffic] = ()) -> Program:
    """The kernels of a program's text, as ``jax.stages.Compiled.as_text`` gives it, in order.

    Raises:
        BenchError: the text has no entry computation.
    """
    computations, entry = _computations(text)
    kernels: list[Kernel] = []
    control_flow: list[str] = []

    def walk(name: str) -> None:
        body = computations[name]
        shapes = {instruction.name: instruction.shapes for instruction in body}
        for instruction in body:
            if instruction.op in NOT_KERNELS or instruction.op.endswith("-done"):
                continue
            if instruction.op in CONTROL_FLOW or instruction.op in ("call", "async-start"):
                if instruction.op in CONTROL_FLOW:
                    control_flow.append(instruction.name)
                keys = "to_apply|calls|body|true_computation|false_computation"
                for called in re.findall(rf"(?:{keys})=%([\w.\-]+)", instruction.attributes):
                    walk(called)
            else:
                kernels.append(_kernel(instruction, shapes, computations, traffic))

    walk(entry)
    return Program(kernels, control_flow)


def layers(kernels: Sequence[Kernel], anchor: str) -> list[list[Kernel]]:
    """Runs of kernels from one whose name begins with ``anchor`` up to the next such: a layer each, the last left
    out."""
    at = [i for i, kernel in enumerate(kernels) if kernel.name.startswith(anchor)]
    return [list(kernels[begin:end]) for begin, end in itertools.pairwise(at)]


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    entry = None
    for line in text.splitlines():
        if current is None:
            header = re.match(r"^(ENTRY )?%?([\w.\-]+)\s*\(.*\{\s*$", line)
            if header and not line.startswith("HloModule"):
                current = computations.setdefault(header.group(2), [])
                entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            current.append(_instruction(*match.groups()))
    if entry is None:
        raise BenchError("the compiled program's text has no entry computation")
    return computations, entry


def _instruction(root: str | None, name: str, shape: str, op: str, rest: str) -> Instruction:
    depths = itertools.accumulate((letter == "(") - (letter == ")") for letter in rest)
    end = next((place for place, depth in enumerate(depths) if depth < 0), len(rest))
    inside, attributes = rest[:end], rest[end + 1 :]
    operands = (inside,) if op in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, tuple(_shapes(shape)), op, operands, attributes, root is not None)


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims in _ARRAY.findall(text):
        yield Shape(dtype, tuple(int(x) for x in dims.split(",") if x))


def _kernel(
    instruction: Instruction,
    shapes: Mapping[str, tuple[Shape, ...]],
    computations: Mapping[str, list[Instruction]],
    traffic: Sequence[Traffic],
) -> Kernel:
    operands = [shapes[name] for name in instruction.operands if name in shapes]
    if instruction.op == "fusion":
        body = computations[instruction.attribute(r"calls=%([\w.\-]+)")]
        reads, written = _fused_bytes(body)
        return Kernel(f"fusion {_contents(body)}", instruction.shapes, sum(reads), written)
    if instruction.op == "custom-call":
        return _custom_call(instruction, [shape for operand in operands for shape in operand], traffic)
    read = sum(shape.nbytes for operand in operands for shape in operand)
    return Kernel(instruction.op, instruction.shapes, read, instruction.nbytes)


def _custom_call(instruction: Instruction, operands: Sequence[Shape], traffic: Sequence[Traffic]) -> Kernel:
    target = instruction.attribute(r'custom_call_target="([^"]+)"')
    library = "cublas" in target or "cudnn" in target
    name = target
    if "triton" in target:  # ours: op_name="jit(f)/NAME/pallas_call"
        name = instruction.attribute(r'op_name="[^"]*?(\w+)/pallas_call') or target
    aliased = re.findall(
        r"\{(\d*)\}: \((\d+), \{\}\)", instruction.attribute(r"output_to_operand_aliasing=\{(.*?\)\s*)\}")
    )
    inputs_of_outputs = {int(output or 0): int(operand) for output, operand in aliased}
    read = written = 0.0
    for number, shape in enumerate(operands):
        special = _found(traffic, name, shape)
        read += shape.nbytes if special is None else special.read
        if special is not None and number in inputs_of_outputs.values():
            written += special.written
    results = instruction.shapes[:1] if library else instruction.shapes  # what else a library has is its workspace
    for number, shape in enumerate(results):
        special = _found(traffic, name, shape)
        if special is None:
            written += shape.nbytes
        elif number not in inputs_of_outputs:
            written += special.written
    return Kernel(name, instruction.shapes, read, written)


def _found(traffic: Iterable[Traffic], kernel: str, shape: Shape) -> Traffic | None:
    return next((entry for entry in traffic if kernel.startswith(entry.kernel) and entry.dims == shape.dims), None)


def _contents(body: Sequence[Instruction]) -> str:
    """The operations of a fusion that say what it is."""
    telling = (
        "dot",
        "scatter",
        "gather",
        "reduce",
        "sort",
        "concatenate",
        "dynamic-update-slice",
        "transpose",
        "cosine",
    )
    return "+".join(op for op in telling if any(instruction.op == op for instruction in body)) or "elementwise"


def _fused_bytes(body: Sequence[Instruction]) -> tuple[list[float], float]:
    """What a fusion reads of each parameter, and what it writes."""
    by_name = {instruction.name: instruction for instruction in body}
    root = next(instruction for instruction in body if instruction.is_root)
    used: collections.Counter[str] = collections.Counter()
    """Elements of each instruction's result that are needed."""
    written = 0.0
    for name in root.operands if root.op == "tuple" else (root.name,):
        used[name] = by_name[name].size
        written += _written(by_name, name)
    for instruction in reversed(body):
        if not used[instruction.name] or instruction.op in ("parameter", "constant", "iota"):
            continue
        for position, operand in enumerate(instruction.operands):
            if operand in by_name:
                taken = _taken(instruction, position, used[instruction.name], by_name[operand].size)
                used[operand] = min(by_name[operand].size, used[operand] + round(taken))
    parameters = [instruction for instruction in body if instruction.op == "parameter"]
    return [p.nbytes * min(1, used[p.name] / max(p.size, 1)) for p in parameters], written


def _written(by_name: Mapping[str, Instruction], name: str) -> float:
    update = by_name[name]
    while update.op in ("bitcast", "reshape", "copy", "convert") and update.operands[0] in by_name:
        update = by_name[update.operands[0]]
    if update.op == "dynamic-update-slice":
        return by_name[update.operands[1]].nbytes
    if update.op == "scatter":
        first = (len(update.operands) - 1) // 2 + 1
        return sum(by_name[operand].nbytes for operand in update.operands[first:])
    return by_name[name].nbytes


def _taken(instruction: Instruction, position: int, needed: int, size: int) -> float:
    """Elements of an operand of ``size`` that ``needed`` elements of a result take."""
    whole = max(instruction.size, 1)
    match instruction.op:
        case "slice" | "dynamic-slice" | "gather":
            return needed if position == 0 else size
        case "dynamic-update-slice":
            return 0 if position == 0 else size
        case "scatter":
            return 0 if position < (len(instruction.operands) - 1) // 2 else size
        case "reduce":
            return size * needed / whole if position < len(instruction.operands) // 2 else size
        case "concatenate":
            return size * needed / whole
        case "dot" | "fusion" | "tuple" | "sort" | "custom-call" | "convolution" | "reduce-window" | "broadcast":
            return size
    return needed
