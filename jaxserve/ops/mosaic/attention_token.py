"""The new token's queries, key and value, one a warp: bias, norm, rotation, and the form the tiles want.

A lane holds quads of four columns: quad `lane`, and `lane` + 32 of heads wider than 128. A query becomes two
halves of q · scale · log2 e; in f16 that holds for |q| up to 360,000 at 64 columns and more beyond. Key and
value are rounded to the cache's type, as a later step will read them.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import NamedTuple

from jaxserve import ptx
from jaxserve.ops.mosaic.attention_cell import Cell
from jaxserve.ops.mosaic.attention_plan import Form, Shared
from jaxserve.ops.mosaic.attention_tile import STEP_BYTES, halves
from jaxserve.ptx import Register, Registers, both, constant, select, when

LANES = 32
OPERAND_BYTES = 64  # of a head in a step: four lanes

Quads = list[Registers]  # f32: of each quad of this lane, its columns


class Sources(NamedTuple):
    """Global addresses of what a token is made from; None where the layer has no such thing."""

    parts: list[Register]
    bias: Register | None
    q_norm: Register | None
    k_norm: Register | None
    cos: Register | None
    sin: Register | None


class Vector(NamedTuple):
    """A query, the key or the value of a cell, as loaded. Empty: the layer has no such thing."""

    head: Register  # of the cell's queries; the key and the value come after them
    is_query: Register
    is_value: Register
    raw: Quads
    bias: Quads
    gain: Quads
    cos: Quads
    sin: Quads
    gate: Quads  # of a query
    gate_bias: Quads


def load_vector(form: Form, sources: Sources, cell: Cell, head: Register) -> Vector:
    """Asks for vector `head` of a cell: its queries, the key, the value. Heads past the last of those that
    share the key repeat it.
    """
    dim, shared = form.dim, form.heads // form.kv_heads
    is_query, is_value = head < form.plan.group, head.equals(form.plan.group + 1)
    query = cell.kv_head * shared + ptx.minimum(cell.first + head, constant(shared - 1))

    def of(name, head, width):
        """Address and, among all, number of the first column of a head."""
        place, (begin, _) = form.place(name), form.columns[name]
        at = (cell.row * place.width + head * width + place.offset) * 4
        return sources.parts[place.part] + at.widened(), head * width + begin

    q, k, v = of("q", query, form.query_width), of("k", cell.kv_head, dim), of("v", cell.kv_head, dim)
    address, column = (
        select(is_query, of_q, select(is_value, of_v, of_k)) for of_q, of_k, of_v in zip(q, k, v, strict=True)
    )

    def quads(address, words=4, wrap=None):
        """This lane's quads of a vector. Those past its end, or past `wrap`, repeat others."""
        if address is None:
            return []
        loaded = []
        for quad in _quads(form, cell.lane):
            if wrap:
                quad = quad % wrap
            elif form.dim % (4 * LANES):
                quad = ptx.minimum(quad, constant(dim // 4 - 1))
            at = address + (quad * (4 * words)).widened()
            loaded.append([w.as_f32() for w in ptx.load_ahead(at, 0, words)])
        return loaded

    bias = None if sources.bias is None else sources.bias + (column * 4).widened()
    gain = None if sources.q_norm is None else select(is_query, sources.q_norm, sources.k_norm)
    gate, gate_bias = (
        select(is_query, at + 4 * dim, at) if at is not None and form.gated else None
        for at in (address, bias)
    )
    cos, sin = [], []
    if form.rotary:
        words = 2 if form.interleaved else 4  # angles of a quad
        at = (cell.row * (form.rotary // 2 * 4)).widened()
        cos, sin = (
            quads(table + at, words, form.rotary // 2 // words) for table in (sources.cos, sources.sin)
        )
    return Vector(
        head,
        is_query,
        is_value,
        quads(address),
        quads(bias),
        quads(gain),
        cos,
        sin,
        quads(gate),
        quads(gate_bias),
    )


def store_vector(
    form: Form, vector: Vector, shared: Shared, cell: Cell, is_owner: Register, token: Registers
) -> None:
    """Puts a query into shared memory as operand of mma, with its gate; the key or the value there as it is,
    and where `is_owner` into the cache.

    shared: addresses; token: addresses of its key and its value in the caches
    """
    dim, lane = form.dim, cell.lane
    quads = _quads(form, lane)
    inside = [quad < dim // 4 for quad in quads]
    present = contextlib.nullcontext if dim % (4 * LANES) == 0 else when
    x = _added(vector.raw, vector.bias)
    if dim % (4 * LANES):
        x = [[select(here, v, constant(0.0)) for v in quad] for here, quad in zip(inside, x, strict=True)]
    turned = _rotated(form, _normed(form, x, vector.gain), vector, lane)
    with when(vector.is_query):
        for quad, here, values in zip(quads, inside, turned, strict=True):
            with present(here):
                at = shared.queries + _operand_offset(dim, quad) + vector.head * OPERAND_BYTES
                scaled = [v * (form.scale * ptx.LOG2_E) for v in values]
                ptx.store_shared(at, 0, _halves(form.dtype, scaled))
    if form.gated:
        with when(vector.is_query):
            gates = shared.gates + vector.head * (4 * dim)
            gate = _added(vector.gate, vector.gate_bias)
            for quad, here, values in zip(quads, inside, gate, strict=True):
                with present(here):
                    ptx.store_shared(gates + quad * 16, 0, [ptx.sigmoid(v) for v in values])
    with when(vector.head >= form.plan.group):
        _, pack, _ = halves(form.dtype)
        target = select(vector.is_value, token[1], token[0])
        row = shared.token + (vector.head - form.plan.group) * (2 * dim)
        for quad, here, key, value in zip(quads, inside, turned, x, strict=True):
            columns = [select(vector.is_value, v, k) for k, v in zip(key, value, strict=True)]
            words = [pack(*columns[:2]), pack(*columns[2:])]
            with present(here):
                ptx.store_shared(row + quad * 8, 0, words)
            with when(both(here, is_owner)):
                ptx.store_global(target + (quad * 8).widened(), 0, words)


def _quads(form, lane) -> Registers:
    return [lane + first for first in range(0, form.dim // 4, LANES)]


def _added(x: Quads, y: Quads) -> Quads:
    if not y:
        return x
    return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(x, y, strict=True)]


def _over_warp(value: Register, operation: Callable[[Register, Register], Register]) -> Register:
    for distance in (16, 8, 4, 2, 1):
        value = operation(value, ptx.shuffle_xor(value.as_i32(), distance).as_f32())
    return value


def _normed(form, x: Quads, gain: Quads) -> Quads:
    """As ops.norm.rms_norm."""
    if not gain:
        return x
    squares = constant(0.0)
    for v in itertools.chain(*x):
        squares = ptx.fma(v, v, squares)
    mean = _over_warp(squares, lambda a, b: a + b) * (1 / form.dim)
    inverse = ptx.reciprocal_root(mean + form.eps)
    return [[v * inverse * g for v, g in zip(*pair, strict=True)] for pair in zip(x, gain, strict=True)]


def _rotated(form, x: Quads, vector: Vector, lane) -> Quads:
    """As ops.rope.rotate. Interleaved pairs are neighbours; else the partner quad is half a turn away: in
    another lane, or with 256 rotary columns in the lane's other quad.
    """
    result = list(x)
    half = form.rotary // 8  # quads
    for i in range(-(-2 * half // LANES)):
        values, cos, sin, quad = x[i], vector.cos[i], vector.sin[i], lane + i * LANES
        if form.interleaved:
            pairs = [(values[2 * j], values[2 * j + 1], cos[j], sin[j]) for j in range(2)]
            turned = [v for a, b, c, s in pairs for v in (a * c - b * s, a * s + b * c)]
        else:
            is_first = quad < half
            if half < LANES:
                partner = select(is_first, lane + half, lane - half) & (LANES - 1)
                other = [ptx.shuffle(v.as_i32(), partner).as_f32() for v in values]
            else:
                other = x[1 - i]
            sin = [select(is_first, constant(0.0) - s, s) for s in sin]
            turned = [v * c + o * s for v, o, c, s in zip(values, other, cos, sin, strict=True)]
        turns = quad < 2 * half
        result[i] = [select(turns, a, b) for a, b in zip(turned, values, strict=True)]
    return result


def _halves(dtype: str, x: Registers) -> Registers:
    """Four columns: two words of rounded values, two of the rests."""
    _, pack, unpack = halves(dtype)
    rounded = [pack(*x[:2]), pack(*x[2:])]
    back = [v for word in rounded for v in unpack(word)]
    rests = [a - b for a, b in zip(x, back, strict=True)]
    return [*rounded, pack(*rests[:2]), pack(*rests[2:])]


def _operand_offset(dim: int, quad: Register) -> Register:
    """Of a quad of head 0 among the operands: step and t, as attention_tile deals out the columns."""
    step, t = ((quad >> 3) << 1) | (quad & 1), (quad >> 1) & 3
    whole = dim // 32 * 8  # quads in pieces of 32 columns; a last piece of 16 is one step
    if whole < dim // 4:
        is_whole = quad < whole
        step, t = select(is_whole, step, constant(whole // 4)), select(is_whole, t, quad - whole)
    return step * STEP_BYTES + t * 16
