"""x @ W.T for 1 … 8 rows of x at the speed of memory: the decode kernel, on Mosaic GPU (Hopper).

A warp owns one chunk of 256 columns and a list of row tiles. It keeps its chunk of all activation rows in
registers and streams the records of that chunk through a ring of its own in shared memory (one bulk copy
and one mbarrier a record): nothing about x is read in the loop, nothing waits for another warp. There is one
block a multiprocessor, all in one wave. The partial results of a block's chunks meet in shared memory and are
summed in fixed order. Where K has more chunks than a block has warps, a cluster of blocks shares them and its
first block sums what the others send.

What stands around a product in a decoder (`Around`) rides along: each would be a kernel of its own. A norm's
gain is multiplied into x as it is read, its 1/rms into the sums at the end; gate and up rows meet in the
final sums, and so does a residual.

A row has the same bits alone and among seven others, and on every call.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve import ptx
from jaxserve.ops.activation import ACTIVATIONS
from jaxserve.ops.norm import rms_norm
from jaxserve.ptx import both, constant, select, when
from jaxserve.quant.mosaic.activations import load_chunk
from jaxserve.quant.mosaic.plan import Plan, plan
from jaxserve.quant.mosaic.products import lane_constants, tile_product
from jaxserve.quant.mosaic.records import COLUMNS, LAYOUTS, ROWS

MAX_BATCH = 8  # columns of the tensor core's operand B
DTYPES = ("float32", "float16", "bfloat16")
LOG2_E = 1.4426950408889634


class Around(NamedTuple):
    """What the kernel does besides multiplying."""

    eps: float | None = None  # of the norm that x goes through; its gain [K] is an operand
    activation: str | None = None  # of the first half of the rows, which then gates the second half
    has_residual: bool = False  # an f32 [B, N] operand is added to the result


PLAIN = Around()


def supported(type_name: str, n: int, k: int) -> bool:
    """Whether the kernel takes an N × K matrix of this type."""
    return type_name in LAYOUTS and n > 0 and n % ROWS == 0 and k > 0 and k % LAYOUTS[type_name].block == 0


# Inner jits: layers of one shape share one lowering, and XLA fuses the sum into what follows.
@functools.partial(jax.jit, static_argnames=("type_name", "k", "eps", "activation"))
def decode_matmul(
    x: jax.Array,
    records: jax.Array,
    type_name: str,
    k: int,
    *,
    gain: jax.Array | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """x [B ≤ 8, K] f32, f16 or bf16 times the transpose of a packed matrix [N, K] → f32 [B, N].

    gain f32 [K]: `rms_norm(x, gain, eps)` is multiplied instead. activation: the matrix holds gate rows, then
    as many up rows; the result is activation(gate) · up, f32 [B, N/2]. residual, of the result's shape, is
    added to it.
    """
    if x.shape[0] > MAX_BATCH:
        raise ValueError(
            f"{x.shape[0]} rows: the decode kernel takes up to {MAX_BATCH}, more are a matrix product"
        )
    _check(x, records, type_name, k, activation)
    p = _plan(records, 1, activation)
    fuses = p.cluster == p.splits  # else no block ever sees a whole sum
    if gain is not None and not (fuses and x.dtype == jnp.float32):
        x, gain = rms_norm(x, gain, eps), None
    if fuses:
        around = Around(None if gain is None else eps, activation, residual is not None)
        return _partial_products(x, records, None, type_name, k, around, gain, residual)[0]
    y = _partial_products(x, records, None, type_name, k).sum(0)
    if activation is not None:
        gate, up = jnp.split(y, 2, axis=-1)
        y = ACTIVATIONS[activation](gate) * up
    return y if residual is None else residual + y


@functools.partial(jax.jit, static_argnames=("type_name", "k", "activation"))
def expert_decode_matmul(
    x: jax.Array,
    records: jax.Array,
    index: jax.Array,
    type_name: str,
    k: int,
    *,
    activation: str | None = None,
) -> jax.Array:
    """Row p of x [P, K] times the transpose of matrix index[p] (i32) of a packed stack [X, N, K] →
    f32 [P, N]; `activation` as in `decode_matmul`.

    Only the chosen matrices are read. An index outside the stack means its last matrix.
    """
    if index.shape != x.shape[:1] or index.dtype != jnp.int32:
        raise ValueError(
            f"index {index.dtype}{index.shape} must be int32 and name a matrix for each of {len(x)} rows"
        )
    _check(x, records, type_name, k, activation)
    p = _plan(records, len(x), activation)
    if p.cluster == p.splits:
        return _partial_products(x, records, index, type_name, k, Around(activation=activation))[0]
    y = _partial_products(x, records, index, type_name, k).sum(0)
    if activation is None:
        return y
    gate, up = jnp.split(y, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up


def _check(x, records, type_name, k, activation):
    n = records.shape[-3] * ROWS
    if not supported(type_name, n, k) or (activation is not None and n % (2 * ROWS)):
        raise ValueError(f"no decode kernel for a {type_name} matrix [{n}, {k}]")
    if x.shape[1] != k or records.shape[-2:] != (-(-k // COLUMNS), LAYOUTS[type_name].words):
        raise ValueError(
            f"x {x.shape} and records {records.shape} do not fit a {type_name} matrix of {k} columns"
        )
    if x.dtype.name not in DTYPES:
        raise ValueError(f"x is {x.dtype}: the decode kernel takes {', '.join(DTYPES)}")


def _plan(records, matrices, activation) -> Plan:
    return plan(*records.shape[-3:-1], records.shape[-1] * 4, matrices, 1 if activation is None else 2)


def _partial_products(
    x, records, index, type_name: str, k: int, around: Around = PLAIN, gain=None, residual=None
) -> jax.Array:
    """f32 [splits that are left, P, N]. Rows share one matrix, or each has matrix index[p] of a stack."""
    rows, n = x.shape[0], records.shape[-3] * ROWS
    batch, matrices = (rows, 1) if index is None else (1, rows)
    p = _plan(records, matrices, around.activation)
    stride = 20 if batch > 1 else 16  # words between columns of a partial result: 20 spreads the banks
    slot = batch * stride
    per_flush = p.tiles_per_flush(slot * 4, batch)

    def body(*refs):
        program = functools.partial(
            _program, type_name, k, p, x, records, batch, stride, around, index is not None
        )
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(program)(*refs)

    body.__name__ = f"decode_{type_name.lower()}_{n}x{k}_b{batch}" + (
        "" if index is None else f"_experts{rows}"
    )
    out = n if around.activation is None else n // 2
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.splits // p.cluster, rows, out), jnp.float32),
        grid=(p.blocks * matrices // p.cluster,),
        grid_names=("block",),
        cluster=(p.cluster,) if p.cluster > 1 else (),
        cluster_names=("split",) if p.cluster > 1 else (),
        num_threads=p.warps // 4,  # Pallas' threads are warpgroups of four warps
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((_rounded(per_flush * p.row_warps * p.chunks * slot),), jnp.float32),
            plgpu.SMEM((_rounded(p.warps * p.stages * p.record_bytes // 4),), jnp.uint32),
            plgpu.SMEM((_rounded(p.warps * p.stages * 2),), jnp.uint32),
            plgpu.SMEM((_rounded(p.splits * p.chunks * batch),), jnp.float32),
            plgpu.SMEM((_rounded(max(4, p.inbox_bytes(per_flush, batch) // 4)),), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return kernel(x, records, *(operand for operand in (index, gain, residual) if operand is not None))


def _rounded(words: int) -> int:
    """Shared memory in pieces of 1 KiB keeps every piece aligned."""
    return -(-words // 256) * 256


def _program(
    type_name,
    k: int,
    p: Plan,
    x,
    records,
    batch: int,
    stride: int,
    around: Around,
    has_index: bool,
    ctx,
    *refs,
):
    """What a thread does. refs: x, records, each row's matrix, gain, residual (where there is one), output,
    partial results, ring, barriers, sums of squares, what the cluster's other blocks have summed.
    """
    (x_ref, w_ref), (o_ref, part_ref, ring_ref, barrier_ref, squares_ref, inbox_ref) = refs[:2], refs[-6:]
    optional = iter(refs[2:-6])
    index_ref, gain_ref, residual_ref = (
        next(optional) if exists else None
        for exists in (has_index, around.eps is not None, around.has_residual)
    )
    (row_tiles, chunks), record = records.shape[-3:-1], p.record_bytes
    rows, n, stages = x.shape[0], row_tiles * ROWS // p.unit, p.stages
    slot, warp_slots = batch * stride, p.row_warps * p.chunks
    per_flush = p.tiles_per_flush(slot * 4, batch)
    flushes = -(-p.tiles_per_warp // per_flush)

    thread, block = ptx.thread_index(), ptx.block_index()
    lane, warp = thread & 31, ptx.shuffle(thread >> 5, 0)
    matrix, row0 = ptx.global_address(w_ref), constant(0)
    if has_index:
        row0, block = block // p.blocks, block % p.blocks
        (which,) = ptx.load_global(ptx.global_address(index_ref) + (row0 * 4).widened(), 0, 1)
        which = select(which < records.shape[0], which, constant(records.shape[0] - 1))
        matrix = matrix + which.widened() * (row_tiles * chunks * record)
    group, split = (block // p.splits, block % p.splits) if p.splits > 1 else (block, constant(0))
    if p.cluster > 1:
        ptx.cluster_arrive("relaxed")
    tile0 = group * p.tiles
    tiles_here = select((tile0 + p.tiles) < row_tiles, constant(p.tiles), constant(row_tiles) - tile0)
    row_warp, chunk_here = warp // p.chunks, warp % p.chunks
    chunk = split * p.chunks + chunk_here
    # surplus warps idle, and so do those of chunks past the end of K
    is_live = both(both(row_warp < p.row_warps, chunk < chunks), row_warp < tiles_here)
    counts_squares = both(both(is_live, row_warp.equals(0)), (lane & 3).equals(0))
    count = (tiles_here - row_warp + (p.row_warps - 1)) // p.row_warps
    count, chunk, row_warp = (select(is_live, v, constant(0)) for v in (count, chunk, row_warp))

    ring = ptx.shared_address(ring_ref) + warp * (stages * record)
    barriers = ptx.shared_address(barrier_ref) + warp * (stages * 8)

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
    here = ptx.global_address(x_ref) + (((row0 + column) * k + first_column) * x.dtype.itemsize).widened()
    gain = ptx.global_address(gain_ref) + (first_column * 4).widened() if gain_ref is not None else None
    xs, inverse, squares = load_chunk(type_name, here, gain, x.dtype, columns_of_last, is_whole, lanes)
    for i in range(1, stages):
        fetch(i)
    sums_of_squares = ptx.shared_address(squares_ref)
    if squares is not None:
        for distance in (1, 2):
            squares = squares + ptx.shuffle_xor(squares.as_i32(), distance).as_f32()
        with when(both(counts_squares, lanes.g < batch)):
            ptx.store_shared(sums_of_squares + (chunk * batch + lanes.g) * 4, 0, [squares])
    if inverse is not None:
        inverse = [ptx.shuffle(inverse.as_i32(), (lanes.t * 2 + i) * 4).as_f32() for i in range(2)]
    part, out = ptx.shared_address(part_ref), ptx.global_address(o_ref)
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

    inbox, quads = ptx.shared_address(inbox_ref), per_flush * p.row_warps // p.unit * 4 * batch

    def each_quad(f, use):
        """use(index, first slot, column, quad, row tile) for every four rows of this flush, one a thread."""
        for base in range(0, quads, p.warps * 32):
            i = thread + base
            s, column, quad = i // (4 * batch) * p.unit, i % (4 * batch) // 4, i % 4
            row_tile = f * (per_flush * p.row_warps) + s
            with when(both(i < quads, row_tile < tiles_here)):
                use(i, s, column, quad, row_tile)

    def letter(i, sender, u):
        """Where block `sender` ≥ 1 of the cluster puts part u of quad i."""
        return inbox + (((sender - 1) * quads + i) * p.unit + u) * 16

    def send(i, s, column, quad, _):
        for u in range(p.unit):
            values = [v.as_i32() for v in sums(s + u, column, quad)]
            ptx.store_peer(ptx.peer_address(letter(i, split, u), constant(0)), values)

    def send_squares():
        with when(thread < p.chunks * batch):
            at = sums_of_squares + (split * (p.chunks * batch) + thread) * 4
            ptx.store_peer(ptx.peer_address(at, constant(0)), ptx.load_shared(at, 0, 1))

    def finish(i, s, column, quad, row_tile):
        results = [sums(s + u, column, quad) for u in range(p.unit)]
        for sender in range(1, p.cluster):
            for u in range(p.unit):
                more = ptx.load_shared(letter(i, constant(sender), u), 0, 4)
                results[u] = [a + b.as_f32() for a, b in zip(results[u], more, strict=True)]
        if around.eps is not None:
            factor = inverse_rms(column)
            results = [[v * factor for v in values] for values in results]
        values = results[0]
        if around.activation is not None:
            values = [_activated(around.activation, g) * u for g, u in zip(*results, strict=True)]
        row = (tile0 + row_tile) // p.unit * ROWS + quad * 4
        left = split if p.cluster == 1 else constant(0)
        at = (((left * rows + row0 + column) * n + row) * 4).widened()
        if around.has_residual:
            more = ptx.load_global(ptx.global_address(residual_ref) + at, 0, 4)
            values = [v + m.as_f32() for v, m in zip(values, more, strict=True)]
        ptx.store_global(out + at, 0, values)

    def flush(f):
        """Sums, finishes and writes results."""
        ptx.block_sync()
        if p.cluster > 1:
            ptx.cluster_wait()
            with when(split >= 1):
                each_quad(f, send)
                if squares is not None:
                    send_squares()
            ptx.cluster_arrive()
            ptx.cluster_wait()
            with when(split.equals(0)):
                each_quad(f, finish)
        else:
            each_quad(f, finish)
        if flushes > 1:
            ptx.block_sync()
            if p.cluster > 1:
                ptx.cluster_arrive()  # the inbox may be filled again

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
    return v * ptx.reciprocal(ptx.exp2(u * -LOG2_E) + 1.0)
