"""What a GPU thread does in the decode kernel (see `decode`)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxlib.mlir import ir

from jaxserve import ptx
from jaxserve.ptx import Register, both, constant, select, when
from jaxserve.quant.mosaic.activations import load_chunk
from jaxserve.quant.mosaic.plan import Plan
from jaxserve.quant.mosaic.products import lane_constants, tile_product
from jaxserve.quant.mosaic.records import COLUMNS, ROWS

MAX_BATCH = 8  # columns of the tensor core's operand B


class Around(NamedTuple):
    """What the kernel does besides multiplying."""

    eps: float | None = None  # of the norm that x goes through; its gain [K] is an operand
    activation: str | None = None  # of the first half of the rows, which then gates the second half
    has_residual: bool = False  # an f32 [B, N] operand is added to the result


class Form(NamedTuple):
    """One matrix of a launch."""

    type_name: str
    k: int
    row_tiles: int
    chunks: int
    experts: int  # matrices of the stack; 1 without an index
    dtype: jnp.dtype  # of x
    rows: int  # of x
    batch: int  # rows that meet one matrix
    around: Around
    plan: Plan
    warps: int  # of a block; the plan may use fewer
    width: int  # columns of the output
    first: int  # of them, this matrix's first

    @property
    def stride(self) -> int:
        """Words between columns of a partial result: 20 spreads the banks."""
        return 20 if self.batch > 1 else 16

    @property
    def slot(self) -> int:
        """Words of a tile's partial result."""
        return self.batch * self.stride

    @property
    def per_flush(self) -> int:
        """Tiles of a warp between two sums."""
        return self.plan.tiles_per_flush(self.slot * 4)

    @property
    def scratch_words(self) -> tuple[int, ...]:
        """Of partial results, ring, barriers, sums of squares."""
        p = self.plan
        return (
            self.per_flush * p.row_warps * p.chunks * self.slot,
            p.warps * p.stages * p.record_bytes // 4,
            p.warps * p.stages * 2,
            self.chunks * self.batch,
        )


class Refs(NamedTuple):
    """Memory: operands (None: there is none), the output, shared memory."""

    x: ir.Value
    records: ir.Value
    index: ir.Value | None  # each row's matrix of a stack
    gain: ir.Value | None
    residual: ir.Value | None
    out: ir.Value
    part: ir.Value  # partial results
    ring: ir.Value
    barriers: ir.Value
    squares: ir.Value  # sums of squares of x, by chunk


def program(form: Form, block: Register, refs: Refs) -> None:
    """Block `block` of this matrix's."""
    type_name, k, around, p, batch, stride = (
        form.type_name, form.k, form.around, form.plan, form.batch, form.stride
    )  # fmt: skip
    row_tiles, chunks, record, stages = form.row_tiles, form.chunks, p.record_bytes, p.stages
    slot, warp_slots, per_flush = form.slot, p.row_warps * p.chunks, form.per_flush
    flushes = -(-p.tiles_per_warp // per_flush)

    thread = ptx.thread_index()
    lane, warp = thread & 31, ptx.shuffle(thread >> 5, 0)
    matrix, row0 = ptx.global_address(refs.records), constant(0)
    if refs.index is not None:
        row0, block = block // p.blocks, block % p.blocks
        (which,) = ptx.load_global(ptx.global_address(refs.index) + (row0 * 4).widened(), 0, 1)
        which = select(which < form.experts, which, constant(form.experts - 1))
        matrix = matrix + which.widened() * (row_tiles * chunks * record)
    group, split = (block // p.splits, block % p.splits) if p.splits > 1 else (block, constant(0))
    tile0 = group * p.tiles
    tiles_here = select((tile0 + p.tiles) < row_tiles, constant(p.tiles), constant(row_tiles) - tile0)
    row_warp, chunk_here = warp // p.chunks, warp % p.chunks
    chunk = split * p.chunks + chunk_here
    # surplus warps idle, and so do those of chunks past the end of K
    is_live = both(both(row_warp < p.row_warps, chunk < chunks), row_warp < tiles_here)
    counts_squares = both(both(is_live, row_warp.equals(0)), (lane & 3).equals(0))
    count = (tiles_here - row_warp + (p.row_warps - 1)) // p.row_warps
    count, chunk, row_warp = (select(is_live, v, constant(0)) for v in (count, chunk, row_warp))

    ring = ptx.shared_address(refs.ring) + warp * (stages * record)
    barriers = ptx.shared_address(refs.barriers) + warp * (stages * 8)

    def source(i):
        """Where tile i of this warp lies: gate and up tiles take turns."""
        tile = tile0 + row_warp + i * p.row_warps
        if p.unit == 2:
            tile = (tile >> 1) + (tile & 1) * (row_tiles // 2)
        return matrix + (tile * chunks + chunk).widened() * record

    def fetch(i: int):
        """Starts the copy of this warp's tile i into the empty slot i."""
        with when(both(lane.equals(0), constant(i) < count)):
            ptx.bulk_copy(ring + i * record, source(constant(i)), record, barriers + i * 8)

    with when(lane.equals(0)):
        for i in range(stages):
            ptx.barrier_init(barriers + i * 8)
        ptx.barrier_fence()
    fetch(0)  # under way before the activations are asked for; the other copies queue behind these
    ptx.warp_sync()
    lanes = lane_constants(type_name, lane)
    column = lanes.g
    if batch < MAX_BATCH:
        column = select(column < batch, column, constant(batch - 1))  # spare columns repeat the last row
    first_column = chunk * COLUMNS + lanes.t * 4
    columns_of_last, is_whole = k - (chunks - 1) * COLUMNS, chunk < chunks - 1
    at = (((row0 + column) * k + first_column) * form.dtype.itemsize).widened()
    here, gain = ptx.global_address(refs.x) + at, None
    if around.eps is not None:
        gain = ptx.global_address(refs.gain) + (first_column * 4).widened()
    xs, inverse, squares = load_chunk(type_name, here, gain, form.dtype, columns_of_last, is_whole, lanes)
    for i in range(1, stages):
        fetch(i)
    sums_of_squares = ptx.shared_address(refs.squares)
    if squares is not None:
        for distance in (1, 2):
            squares = squares + ptx.shuffle_xor(squares.as_i32(), distance).as_f32()
        with when(both(counts_squares, lanes.g < batch)):
            ptx.store_shared(sums_of_squares + (chunk * batch + lanes.g) * 4, 0, [squares])
    if inverse is not None:
        inverse = [ptx.shuffle(inverse.as_i32(), (lanes.t * 2 + i) * 4).as_f32() for i in range(2)]
    part, out = ptx.shared_address(refs.part), ptx.global_address(refs.out)
    mine = part + ((row_warp * p.chunks + chunk_here) * slot + lanes.t * (2 * stride) + lanes.g) * 4

    def tile(j, i, stage, parity):
        """Tile i of this warp, slot j of the current flush."""
        if p.tiles_per_warp > stages:
            # Refills the slot of tile i − 1 only now, when mma has consumed its registers: started right
            # after the loads that empty it, the copy could overtake them.
            ptx.warp_sync()
            before, ahead = select(stage.equals(0), constant(stages - 1), stage - 1), i + (stages - 1)
            with when(both(both(lane.equals(0), i >= 1), ahead < count)):
                ptx.bulk_copy(ring + before * record, source(ahead), record, barriers + before * 8)
        with when(i < count):
            ptx.barrier_wait(barriers + stage * 8, parity)
        c = tile_product(type_name, ring + stage * record, xs, lanes)
        if inverse is not None:
            c = [c[i] * inverse[i % 2] for i in range(4)]
        at = mine + j * (warp_slots * slot * 4)
        for d in range(min(2, batch)):
            exists = i < count
            if batch < MAX_BATCH:
                exists = both(exists, (lanes.t * 2 + d) < batch)
            with when(exists):
                ptx.store_shared(at, d * stride * 4, [c[d]])
                ptx.store_shared(at, d * stride * 4 + 32, [c[2 + d]])
        wrap = stage.equals(stages - 1)
        return [select(wrap, constant(0), stage + 1), select(wrap, parity ^ 1, parity)]

    def sums(s, column, quad):
        """Four rows of slot s, summed over the block's chunks in fixed order."""
        at = part + (s * (p.chunks * slot) + column * stride + quad * 4) * 4
        total = [w.as_f32() for w in ptx.load_shared(at, 0, 4)]
        for c in range(1, p.chunks):
            terms = [w.as_f32() for w in ptx.load_shared(at, c * slot * 4, 4)]
            if p.splits * p.chunks != chunks:
                exists = (split * p.chunks + c) < chunks
                terms = [select(exists, v, constant(0.0)) for v in terms]
            total = [a + b for a, b in zip(total, terms, strict=True)]
        return total

    def inverse_rms(column):
        at = sums_of_squares + column * 4
        total = constant(0.0)
        for c in range(chunks):
            total = total + ptx.load_shared(at, c * batch * 4, 1)[0].as_f32()
        return ptx.reciprocal_root(ptx.fma(total, constant(1 / k), constant(float(around.eps))))

    quads = per_flush * p.row_warps // p.unit * 4 * batch

    def finish(s, column, quad, row_tile):
        results = [sums(s + u, column, quad) for u in range(p.unit)]
        if around.eps is not None:
            factor = inverse_rms(column)
            results = [[v * factor for v in values] for values in results]
        values = results[0]
        if around.activation is not None:
            values = [_activated(around.activation, g) * u for g, u in zip(*results, strict=True)]
        row = (tile0 + row_tile) // p.unit * ROWS + quad * 4
        at = (((split * form.rows + row0 + column) * form.width + form.first + row) * 4).widened()
        if around.has_residual:
            more = ptx.load_global(ptx.global_address(refs.residual) + at, 0, 4)
            values = [v + m.as_f32() for v, m in zip(values, more, strict=True)]
        ptx.store_global(out + at, 0, values)

    def flush(f):
        """Sums, finishes and writes results, four rows a thread."""
        ptx.block_sync()
        for base in range(0, quads, form.warps * 32):
            i = thread + base
            s, column, quad = i // (4 * batch) * p.unit, i % (4 * batch) // 4, i % 4
            row_tile = f * (per_flush * p.row_warps) + s
            with when(both(i < quads, row_tile < tiles_here)):
                finish(s, column, quad, row_tile)
        if flushes > 1:
            ptx.block_sync()

    def tiles_then_flush(f, state):
        state = ptx.loop(per_flush, state, lambda j, s: tile(j, f * per_flush + j, *s))
        flush(f)
        return state

    ptx.loop(flushes, [constant(0), constant(0)], tiles_then_flush)


def _activated(name: str, v: ptx.Register) -> ptx.Register:
    """SiLU is v · sigmoid(v), GELU in its tanh form v · sigmoid(2√(2/π) (v + 0.044715 v³))."""
    u = v
    if name == "gelu":
        u = ptx.fma(v * v, v * 0.044715, v) * 1.5957691216057308
    return v * ptx.sigmoid(u)
