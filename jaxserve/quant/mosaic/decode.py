"""x @ W.T for 1 … 8 rows of x at the speed of memory: the decode kernel, on Mosaic GPU (Hopper).

Work split. A warp owns one chunk of 256 columns and a list of row tiles. It keeps its chunk of all activation rows in
registers, as the tensor core's operand B, and streams the records of that chunk through a ring of its own in shared
memory (one bulk copy and one mbarrier a record): nothing about x is read in the loop, nothing waits for another warp.
A block is RG × KC warps (row groups × chunks), one block a multiprocessor, one wave. The KC partial results of a row
meet in shared memory and are summed in fixed order; where K has more than 16 chunks it is split over several blocks
and the caller sums [split, B, N].

Nothing depends on the number of rows, so a row's bits are the same alone and among seven others.

Range. Each row's chunk is multiplied by the power of two that brings its largest value into [0.5, 1), undone in f32:
f16 neither overflows nor starves small values, whatever the activations' type.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.quant.mosaic import ptx
from jaxserve.quant.mosaic.products import PRODUCTS, Chunk, Lane, lane_constants, tile_product
from jaxserve.quant.mosaic.ptx import Register, Registers, both, constant, select, when
from jaxserve.quant.mosaic.records import COLUMNS, LAYOUTS, ROWS

MULTIPROCESSORS = 132  # H100 SXM, H200; fewer only means a second wave
MAX_BATCH = 8  # columns of mma's operand B
SHARED_BYTES = 215 * 1024  # of 227 KiB: ring and partial results
RING_BYTES = SHARED_BYTES * 2 // 3
DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)

# f32 exponent fields between which a chunk's factor and its inverse are normal numbers of the activations' type
SMALLEST = {jnp.dtype(jnp.float16): 111 << 23}  # a factor of 2^15 is f16's largest
LARGEST_EXPONENT = 252 << 23


@dataclasses.dataclass(frozen=True)
class Plan:
    """Blocks: `splits` ranges of K × `groups` groups of row tiles. Warps of a block: row_warps × chunks."""

    chunks: int  # KC: chunks of a block
    splits: int
    row_warps: int  # RG: warps that share a chunk, each every RG-th row tile
    tiles: int  # row tiles of a block
    groups: int


def supported(type_name: str, n: int, k: int) -> bool:
    """Whether the kernel takes an N × K matrix of this type."""
    return type_name in LAYOUTS and n > 0 and n % ROWS == 0 and k > 0 and k % LAYOUTS[type_name].block == 0


def plan(row_tiles: int, chunks: int, record_bytes: int, copies: int = 1) -> Plan:
    """The cheapest cut of a matrix, by a cost in µs fitted to measurements on an H200.

    `copies` matrices share the device. They never change how K is cut: the order of summation follows from that.
    """
    max_warps = 16 if 32 * record_bytes <= RING_BYTES else 8  # two ring slots each
    candidates = []
    for splits in range(1, chunks + 1):
        per_block = -(-chunks // splits)
        if per_block <= max_warps and -(-chunks // per_block) == splits:
            candidates.append(_spread(row_tiles, per_block, splits, max_warps, record_bytes, 1))
    cost, best = min(candidates, key=lambda c: c[0])
    if copies > 1:
        cost, best = _spread(row_tiles, best.chunks, best.splits, max_warps, record_bytes, copies)
    return best


def _spread(row_tiles, chunks, splits, max_warps, record_bytes, copies):
    """(cost, Plan) of the best spread of row tiles over the blocks that one range of K gets."""
    best = None
    for row_warps in range(1, max_warps // chunks + 1):
        groups = max(1, min(MULTIPROCESSORS // (splits * copies), -(-row_tiles // row_warps)))
        tiles = -(-row_tiles // groups)
        groups, per_warp = -(-row_tiles // tiles), -(-tiles // row_warps)
        memory = (
            tiles * chunks * record_bytes / 31e3
        )  # a multiprocessor's share of the bandwidth, bytes per µs
        cost = max(memory, 0.25 * per_warp) + 0.1 * per_warp + 0.005 * row_warps * chunks
        cost += splits * (row_tiles * ROWS * 64 / 3e6 + 0.05)
        if best is None or cost < best[0] - 1e-9:
            best = cost, Plan(chunks, splits, row_warps, tiles, groups)
    return best


# ---- activations


def _activations(address: Register, dtype, columns_here, is_whole: Register) -> list[Registers]:
    """Per step, this lane's four columns as words: two pairs of 16-bit floats, or four f32.

    address: of column 4t of a row's chunk. Steps past `columns_here` exist only where `is_whole`: zeros elsewhere.
    """
    size = jnp.dtype(dtype).itemsize
    steps = []
    for step in range(COLUMNS // 16):
        offset, count = step * 16 * size, size
        if 16 * step < columns_here:
            steps.append(ptx.load_global(address, offset, count))
        else:
            at = select(is_whole, address + offset, address)
            words = ptx.load_global(at, 0, count)
            steps.append([select(is_whole, w, constant(0)) for w in words])
    return steps


def _largest(values: Registers, maximum) -> Register:
    while len(values) > 1:
        values = [maximum(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _f32_pairs(steps, dtype):
    """Words of every step → pairs of f32, two a step."""
    if dtype == jnp.float32:
        floats = [w.as_f32() for words in steps for w in words]
        return list(zip(floats[::2], floats[1::2], strict=True))
    unpack = ptx.unpack_f16x2 if dtype == jnp.float16 else ptx.unpack_bf16x2
    return [unpack(w) for words in steps for w in words]


def _power_of_two(largest: Register, dtype) -> tuple[Register, Register]:
    """The factor that brings `largest` (over the row's four lanes) into [0.5, 1), and its inverse, f32."""
    for distance in (1, 2):
        largest = ptx.maximum(largest, ptx.shuffle_xor(largest.as_i32(), distance).as_f32())
    low, high = SMALLEST.get(jnp.dtype(dtype), 16 << 23), LARGEST_EXPONENT
    exponent = largest.as_i32() & 0x7F800000
    exponent = select(exponent < low, constant(low), select(exponent >= high, constant(high), exponent))
    return (constant(253 << 23) - exponent).as_f32(), (exponent + (1 << 23)).as_f32()


def _scaled_f16(steps, dtype) -> tuple[Registers, Register]:
    """Words of every step → operand B in f16, and the factor that undoes its scaling."""
    if dtype == jnp.float16:
        words = [w for words in steps for w in words]
        pair = _largest([ptx.absolute_f16x2(w) for w in words], ptx.maximum_f16x2)
        factor, inverse = _power_of_two(ptx.maximum(*ptx.unpack_f16x2(pair)), dtype)
        factors = ptx.pack_f16x2(factor, factor)
        return [ptx.multiply_f16x2(w, factors) for w in words], inverse
    pairs = _f32_pairs(steps, dtype)
    factor, inverse = _power_of_two(
        _largest([ptx.absolute(a) for pair in pairs for a in pair], ptx.maximum), dtype
    )
    return [ptx.pack_f16x2(a * factor, b * factor) for a, b in pairs], inverse


def _bf16_halves(steps, dtype) -> tuple[Registers, Registers]:
    """Words of every step → operand B as high and low bf16 halves: 16 bits of every value."""
    if dtype == jnp.bfloat16:
        return [w for words in steps for w in words], []
    pairs = _f32_pairs(steps, dtype)
    high = [ptx.pack_bf16x2(*pair) for pair in pairs]
    rest = [
        ptx.pack_bf16x2(*(a - b for a, b in zip(pair, ptx.unpack_bf16x2(h), strict=True)))
        for pair, h in zip(pairs, high, strict=True)
    ]
    return high, rest


def _group_sums(codes: Registers, k: Lane) -> list[Registers]:
    """Sums of columns 2t, 2t+1 over the 16 rows of steps g and g + 8.   → [step // 8][column]

    From the rounded values, so that a bias cancels exactly. With ones for A every row of the product is the sum.
    """
    ones, sums = [constant(0x3C003C00)] * 4, [ptx.zeros(2), ptx.zeros(2)]
    for step in range(COLUMNS // 16):
        c = ptx.mma(ptx.zeros(4), ones, codes[2 * step : 2 * step + 2])
        half = step // 8
        sums[half] = [select(k.g.equals(step % 8), c[i], sums[half][i]) for i in range(2)]
    return sums


def _pair_sums(codes: Registers, k: Lane) -> list[Registers]:
    """The same for the even and the odd step of group g of 32 columns.   → [step % 2][column]"""
    ones, sums = [constant(0x3C003C00)] * 4, [ptx.zeros(2), ptx.zeros(2)]
    for step in range(COLUMNS // 16):
        c = ptx.mma(ptx.zeros(4), ones, codes[2 * step : 2 * step + 2])
        odd = step % 2
        sums[odd] = [select(k.g.equals(step // 2), c[i], sums[odd][i]) for i in range(2)]
    return sums


def _operand(sums: list[Registers]) -> Registers:
    """f32 [8 groups][column] each → operand B [column][group]: all high f16 halves, then all low ones."""
    high = [ptx.pack_f16x2(*pair) for pair in sums]
    rest = [
        [a - b for a, b in zip(s, ptx.unpack_f16x2(h), strict=True)] for s, h in zip(sums, high, strict=True)
    ]
    return [ptx.transpose_8x8(w) for w in [*high, *(ptx.pack_f16x2(*pair) for pair in rest)]]


def _lane_constant(values: tuple[int, ...], g: Register) -> Register:
    """−values[g % 4] as f32."""
    numbers = [constant(-float(v)) for v in values]
    if len(set(values)) == 1:
        return numbers[0]
    pairs = [select((g & 1).equals(0), a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    return select((g & 2).equals(0), *pairs)


def _load_chunk(type_name, address, dtype, columns_here, is_whole, k) -> tuple[Chunk, Register | None]:
    """This lane's share of a chunk, and the factor its results must be multiplied by."""
    steps = _activations(address, dtype, columns_here, is_whole)
    if type_name == "BF16":
        return Chunk(*_bf16_halves(steps, dtype), [], []), None
    codes, inverse = _scaled_f16(steps, dtype)
    product, sums, bias = PRODUCTS[type_name], [], []
    if any(product.bias) or product.mins:
        by_16 = LAYOUTS[type_name].group == 16
        parts = (_group_sums if by_16 else _pair_sums)(codes, k)
        if by_16:
            factor = _lane_constant(product.bias, k.g)
            sums, bias = parts, [[v * factor for v in part] for part in parts]
        else:
            (even, odd), (b0, b1) = parts, (constant(-float(b)) for b in product.bias[:2])
            sums = [[a + b for a, b in zip(even, odd, strict=True)]]
            bias = [[ptx.fma(a, b0, b * b1) for a, b in zip(even, odd, strict=True)]]
        sums, bias = _operand(sums) if product.mins else [], _operand(bias)
    return Chunk(codes, [], sums, bias), inverse


# ---- the kernel


def _partial_products(x, records, index, type_name: str, k: int) -> jax.Array:
    """x [P, K] → f32 [splits, P, N]. Without `index` the P ≤ 8 rows share the matrix `records` [R, U, words];
    with it, i32 [P], row p has matrix records[index[p]] of [X, R, U, words] to itself."""
    layout = LAYOUTS[type_name]
    rows, (row_tiles, chunks, words) = x.shape[0], records.shape[-3:]
    _check(x, records, index, type_name, k)
    n, dtype, record = row_tiles * ROWS, x.dtype, words * 4
    batch, copies = (rows, 1) if index is None else (1, rows)
    p = plan(row_tiles, chunks, record, copies)
    warps = -(-p.row_warps * p.chunks // 4) * 4
    per_warp = -(-p.tiles // p.row_warps)
    stride = (
        20 if batch > 1 else 16
    )  # words between columns of a partial result [column][row]: 20 spreads the banks
    slot = batch * stride
    stages = min(3 if per_warp > 8 else 2, per_warp)  # slots of a warp's ring; more only delay a short run
    while stages > 1 and warps * stages * record > RING_BYTES:
        stages -= 1
    # tiles between two meetings of a block's partial results
    per_flush = max(
        1, min(per_warp, (SHARED_BYTES - warps * stages * record) // (p.row_warps * p.chunks * slot * 4))
    )
    flushes = -(-per_warp // per_flush)
    per_flush = -(-per_warp // flushes)
    blocks = p.groups * p.splits

    def program(ctx, x_ref, w_ref, *refs):
        o_ref, part_ref, ring_ref, barrier_ref = refs[-4:]
        thread, block = ptx.thread_index(), ptx.block_index()
        lane, warp = thread & 31, ptx.shuffle(thread >> 5, 0)
        matrix, x_row, first = ptx.global_address(w_ref), constant(0), block
        if index is not None:
            x_row, first = block // blocks, block % blocks
            (which,) = ptx.load_global(ptx.global_address(refs[0]) + (x_row * 4).widened(), 0, 1)
            which = select(which < records.shape[0], which, constant(records.shape[0] - 1))
            matrix = matrix + which.widened() * (row_tiles * chunks * record)
        group, split = (first % p.groups, first // p.groups) if p.splits > 1 else (first, constant(0))
        row_warp, chunk_here = warp // p.chunks, warp % p.chunks
        chunk, tile0 = split * p.chunks + chunk_here, group * p.tiles
        tiles_here = select((tile0 + p.tiles) < row_tiles, constant(p.tiles), constant(row_tiles) - tile0)
        count = (tiles_here - row_warp + (p.row_warps - 1)) // p.row_warps
        # warps beyond row_warps × chunks idle, and so do those of chunks past the end of K
        is_live = both(both(row_warp < p.row_warps, chunk < chunks), row_warp < tiles_here)
        count, chunk, row_warp = (select(is_live, v, constant(0)) for v in (count, chunk, row_warp))

        source, step = (
            matrix + ((tile0 + row_warp) * chunks + chunk).widened() * record,
            p.row_warps * chunks * record,
        )
        ring = ptx.shared_address(ring_ref) + warp * (stages * record)
        barriers = ptx.shared_address(barrier_ref) + warp * (stages * 8)

        def fetch(i: int):
            """Starts the copy of this warp's tile i into the empty slot i."""
            with when(both(lane.equals(0), constant(i) < count)):
                ptx.bulk_copy(ring + i * record, source + i * step, record, barriers + i * 8)

        with when(lane.equals(0)):
            for i in range(stages):
                ptx.barrier_init(barriers + i * 8)
            ptx.barrier_fence()
        # one copy is under way before the activations are asked for, the others queue behind them
        fetch(0)
        ptx.warp_sync()
        lanes = lane_constants(type_name, lane)
        column = lanes.g
        if batch < MAX_BATCH:
            column = select(column < batch, column, constant(batch - 1))  # spare columns repeat the last row
        at = ((x_row + column) * k + chunk * COLUMNS + lanes.t * 4) * dtype.itemsize
        last_columns = k - (chunks - 1) * COLUMNS
        is_whole = chunk < chunks - 1
        here = ptx.global_address(x_ref) + at.widened()
        xs, inverse = _load_chunk(type_name, here, dtype, last_columns, is_whole, lanes)
        for i in range(1, stages):
            fetch(i)
        if inverse is not None:
            inverse = [ptx.shuffle(inverse.as_i32(), (lanes.t * 2 + i) * 4).as_f32() for i in range(2)]
        part, out = ptx.shared_address(part_ref), ptx.global_address(o_ref)
        mine = part + ((row_warp * p.chunks + chunk_here) * slot + lanes.t * (2 * stride) + lanes.g) * 4

        def tile(j, i, stage, parity):
            """Tile i of this warp, slot j of the current flush."""
            if per_warp > stages:
                # Refills the slot of tile i − 1 only now, when mma has consumed its registers: right after the
                # loads that empty it, the copy could overtake them.
                ptx.warp_sync()
                before = select(stage.equals(0), constant(stages - 1), stage - 1)
                ahead = i + (stages - 1)
                with when(both(both(lane.equals(0), i >= 1), ahead < count)):
                    ptx.bulk_copy(
                        ring + before * record, source + ahead.widened() * step, record, barriers + before * 8
                    )
            with when(i < count):
                ptx.barrier_wait(barriers + stage * 8, parity)
            c = tile_product(type_name, ring + stage * record, xs, lanes)
            if inverse is not None:
                c = [c[i] * inverse[i % 2] for i in range(4)]
            at = mine + j * (p.row_warps * p.chunks * slot * 4)
            for d in range(min(2, batch)):
                exists = i < count
                if batch < MAX_BATCH:
                    exists = both(exists, (lanes.t * 2 + d) < batch)
                with when(exists):
                    ptx.store_shared(at, d * stride * 4, [c[d]])
                    ptx.store_shared(at, d * stride * 4 + 32, [c[2 + d]])
            wrap = stage.equals(stages - 1)
            return [select(wrap, constant(0), stage + 1), select(wrap, parity ^ 1, parity)]

        def flush(f):
            """Sums over the block's chunks in fixed order, four rows a thread."""
            ptx.block_sync()
            total = per_flush * p.row_warps * 4 * batch
            for base in range(0, total, warps * 32):
                i = thread + base
                s, column, quad = i // (4 * batch), i % (4 * batch) // 4, i % 4
                row_tile = (f * per_flush + s // p.row_warps) * p.row_warps + s % p.row_warps
                with when(both(i < total, row_tile < tiles_here)):
                    at = part + (s * (p.chunks * slot) + column * stride + quad * 4) * 4
                    sums = [w.as_f32() for w in ptx.load_shared(at, 0, 4)]
                    for c in range(1, p.chunks):
                        terms = [w.as_f32() for w in ptx.load_shared(at, c * slot * 4, 4)]
                        if p.splits * p.chunks != chunks:
                            exists = (split * p.chunks + c) < chunks
                            terms = [select(exists, v, constant(0.0)) for v in terms]
                        sums = [a + b for a, b in zip(sums, terms, strict=True)]
                    row = (tile0 + row_tile) * ROWS + quad * 4
                    target = ((split * rows + x_row + column) * n + row).widened() * 4
                    ptx.store_global(out + target, 0, sums)
            if flushes > 1:
                ptx.block_sync()

        def one_flush(f, state):
            state = ptx.loop(per_flush, state, lambda j, s: tile(j, f * per_flush + j, *s))
            flush(f)
            return state

        ptx.loop(flushes, [constant(0), constant(0)], one_flush)

    def body(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(program)(*refs)

    body.__name__ = f"decode_{type_name.lower()}_{n}x{k}_b{batch}" + (
        "" if index is None else f"_experts{rows}"
    )
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.splits, rows, n), jnp.float32),
        grid=(blocks * copies,),
        grid_names=("block",),
        num_threads=warps // 4,  # Pallas' threads are warpgroups of four warps
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((_rounded(per_flush * p.row_warps * p.chunks * slot),), jnp.float32),
            plgpu.SMEM((_rounded(warps * stages * layout.words),), jnp.uint32),
            plgpu.SMEM((_rounded(warps * stages * 2),), jnp.uint32),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return kernel(x, records) if index is None else kernel(x, records, index)


def _rounded(words: int) -> int:
    return -(-words // 256) * 256


def _check(x, records, index, type_name, k):
    rows, columns = x.shape
    n = records.shape[-3] * ROWS
    if not supported(type_name, n, k):
        raise ValueError(f"no decode kernel for a {type_name} matrix [{n}, {k}]")
    if columns != k or records.shape[-2:] != (-(-k // COLUMNS), LAYOUTS[type_name].words):
        raise ValueError(
            f"x {x.shape} and records {records.shape} do not fit a {type_name} matrix with {k} columns"
        )
    if rows < 1 or (index is None and rows > MAX_BATCH):
        raise ValueError(
            f"{rows} rows: the decode kernel takes 1 to {MAX_BATCH}; more rows are a matrix product"
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: the decode kernel takes float32, float16 or bfloat16")
    if index is not None and (index.shape != (rows,) or index.dtype != jnp.int32):
        raise ValueError(
            f"index {index.dtype}{index.shape} must name one matrix for each of {rows} rows, int32"
        )


# inner jits: layers of one shape share one lowering, and XLA fuses the sum into what follows
@functools.partial(jax.jit, static_argnums=(2, 3))
def decode_matmul(x: jax.Array, records: jax.Array, type_name: str, k: int) -> jax.Array:
    """x [B ≤ 8, K] f32, f16 or bf16 times the transpose of a packed matrix [N, K] → f32 [B, N]."""
    return _partial_products(x, records, None, type_name, k).sum(0)


@functools.partial(jax.jit, static_argnums=(3, 4))
def expert_decode_matmul(
    x: jax.Array, records: jax.Array, index: jax.Array, type_name: str, k: int
) -> jax.Array:
    """Row p of x [P, K] times the transpose of matrix index[p] of a packed stack [X, N, K] → f32 [P, N].

    Only the chosen matrices are read. An index past the end means the last matrix, a negative one too.
    """
    return _partial_products(x, records, index, type_name, k).sum(0)
