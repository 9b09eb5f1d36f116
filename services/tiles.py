"""Products of matrices by tiles that stay in vector registers, for the compiled kernels.

A tile is a few rows by one or two vectors of columns: each step of its loop loads a vector of the weights once for all rows,
and adds the products to sums that never leave the registers. Each element is the sum of its products in the order of the
inputs, whatever the number of rows, so a token's result does not depend on what else a pass computes. LLVM makes of the
vectors what the processor has.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from penstock.services.compilation import compiled

F32 = npt.NDArray[np.float32]

LANES = 16
"""Columns of a vector. Processors with shorter ones take several registers for it."""
_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
VECTORS, ROWS = (2, 8) if _WIDE else (1, 6)
"""Of the largest tile, as many as there are registers for: 16 sums of 32 vector registers, or 12 of 16 half as long."""
PANEL = VECTORS * LANES


def _tile(vectors: int, lanes: int) -> Any:
    """A compiled `out += x @ w` for up to ROWS rows and so many vectors of columns, `lanes` each.

    Its arguments: the addresses of x, w and out, the numbers of rows and inputs, and the lengths of their lines in elements.
    """

    @intrinsic
    def tile(_: Any, x: Any, w: Any, out: Any, rows: Any, inputs: Any, x_line: Any, w_line: Any, out_line: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
            addresses, rows, sizes = args[:3], args[3], args[4:]
            bases = [builder.inttoptr(address, ir.FloatType().as_pointer()) for address in addresses]
            for count in range(1, ROWS + 1):
                with builder.if_then(builder.icmp_signed("==", rows, ir.Constant(rows.type, count))):
                    _generate(builder, count, vectors, lanes, bases, sizes)
            return context.get_dummy_value()

        sizes = (rows, inputs, x_line, w_line, out_line)
        return numba.types.void(x, w, out, *(numba.types.intp for _ in sizes)), generate

    return tile


def _generate(builder: Any, rows: int, vectors: int, lanes: int, bases: Sequence[Any], sizes: Sequence[Any]) -> None:
    """The instructions of one size of tile. bases: x, w and out. sizes: inputs, then the lengths of their lines."""
    (x, w, out), (inputs, x_line, w_line, out_line) = bases, sizes
    index, number = ir.IntType(64), ir.FloatType()
    vector, every = ir.VectorType(number, lanes), ir.VectorType(ir.IntType(32), lanes)
    undefined = ir.Constant(vector, ir.Undefined)

    def place(base: Any, row: Any, line: Any, column: Any) -> Any:
        return builder.gep(base, [builder.add(builder.mul(row, line), column)])

    def vector_place(base: Any, row: Any, line: Any, v: int) -> Any:
        return builder.bitcast(place(base, row, line, ir.Constant(index, v * lanes)), vector.as_pointer())

    numbers = [ir.Constant(index, r) for r in range(rows)]
    places = [vector_place(out, r, out_line, v) for r in numbers for v in range(vectors)]
    sums = [cgutils.alloca_once_value(builder, builder.load(each, align=4)) for each in places]
    with cgutils.for_range(builder, inputs) as loop:
        weights = [builder.load(vector_place(w, loop.index, w_line, v), align=4) for v in range(vectors)]
        for r, row in enumerate(numbers):
            element = builder.load(place(x, row, x_line, loop.index))
            first = builder.insert_element(undefined, element, ir.Constant(ir.IntType(32), 0))
            spread = builder.shuffle_vector(first, undefined, ir.Constant(every, [0] * lanes))
            for weight, total in zip(weights, sums[r * vectors : (r + 1) * vectors], strict=True):
                # `contract` allows one instruction for both, and nothing else
                term = builder.fmul(spread, weight, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), term, flags=("contract",)), total)
    for each, total in zip(places, sums, strict=True):
        builder.store(builder.load(total), each, align=4)


_panel, _vector, _column = _tile(VECTORS, LANES), _tile(1, LANES), _tile(1, 1)


class Product(NamedTuple):
    """The sizes of a product: x is (rows, inputs), w (inputs, columns); and the lengths of their lines and of the result's,
    in elements."""

    rows: int
    inputs: int
    columns: int
    x_line: int
    w_line: int
    out_line: int


@compiled()
def add_product(x: int, w: int, out: int, size: Product) -> None:
    """Out += x @ w, of float32 at these addresses: out[r, c] = (((out[r, c] + x[r, 0] w[0, c]) + x[r, 1] w[1, c]) + ...)."""
    rows, inputs, columns, x_line, w_line, out_line = size
    done = 0
    while done < columns:
        width = PANEL if done + PANEL <= columns else LANES if done + LANES <= columns else 1
        for r in range(0, rows, ROWS):
            x_at, w_at, out_at = x + 4 * r * x_line, w + 4 * done, out + 4 * (r * out_line + done)
            count = min(ROWS, rows - r)
            if width == PANEL:
                _panel(x_at, w_at, out_at, count, inputs, x_line, w_line, out_line)
            elif width == LANES:
                _vector(x_at, w_at, out_at, count, inputs, x_line, w_line, out_line)
            else:
                _column(x_at, w_at, out_at, count, inputs, x_line, w_line, out_line)
        done += width


def panels(*weights: F32) -> F32:
    """Weights (outputs, inputs), one under the other, as `product` reads them: (panels, inputs, PANEL), padded with 0."""
    outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
    result = np.empty((-(-outputs // PANEL), inputs, PANEL), np.float32)
    fill_panels(weights, result)
    return result


def fill_panels(weights: Sequence[F32], out: F32) -> None:
    """Write the `panels` of weights to `out`, without a copy of them all."""
    first = 0
    for weight in weights:
        for row in range(0, len(weight), PANEL):
            part = weight[row : row + PANEL]
            _fill(part, first + row, out)
        first += len(weight)
    out[-1, :, first - (len(out) - 1) * PANEL :] = 0.0


def _fill(rows: F32, first: int, out: F32) -> None:
    """Rows from output `first` on, which may begin within a panel."""
    panel, lane = divmod(first, PANEL)
    here = min(len(rows), PANEL - lane)
    out[panel, :, lane : lane + here] = rows[:here].T
    if here < len(rows):
        out[panel + 1, :, : len(rows) - here] = rows[here:].T


@compiled()
def product(x: F32, weight: F32, bias: F32, out: F32) -> None:
    """Multiply rows x (N, inputs) by the `panels` of a weight (outputs, inputs), which are read once; out (N, outputs).

    bias: (outputs,), or (0,) for none.
    """
    rows, outputs = out.shape
    inputs = weight.shape[1]
    if bias.shape[0]:
        for n in range(rows):
            out[n] = bias
    else:
        out[:] = np.float32(0.0)
    for p in range(weight.shape[0]):
        first = p * PANEL
        size = Product(rows, inputs, min(PANEL, outputs - first), inputs, PANEL, outputs)
        weights, sums = weight.ctypes.data + 4 * first * inputs, out.ctypes.data + 4 * first
        add_product(x.ctypes.data, weights, sums, size)
