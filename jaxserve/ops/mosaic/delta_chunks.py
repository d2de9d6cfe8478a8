"""The delta rule within a chunk of 64 tokens, for all chunks at once: the first of two prefill kernels.

With the letters of `ops.delta.delta_chunked`, a block of 8 warps computes of one chunk of one value head
U and W of (I + A) U = β V, (I + A) W = β e^Λ K, the attention (Q Kᵀ) ⊙ Γ, e^Λ and the last row of Γ.

K and V lie in shared memory. Γ is summed term by term, its place then taken by (I + A)⁻¹: blocks of 16 by
forward substitution, then of 32 and of 64 by halves (`ops.delta.unit_lower_inverse`). Products of whole
matrices run on the tensor core (`tf32`); what lies above the diagonal is left out.
"""

from jaxserve import ptx
from jaxserve.ops.mosaic.tf32 import multiply_add, quad_steps, split, split_all
from jaxserve.ptx import Register, Registers, both, constant, select, when

CHUNK = 64  # tokens
DIM = 128  # of keys and of values
WARPS = 8
BLOCK = 16  # rows of a step of the tensor core
# Words between rows in shared memory: they spread what a warp reads at once over the banks.
K_STRIDE, V_STRIDE, SQUARE_STRIDE = DIM + 16, DIM + 8, CHUNK + 4
K_AT, V_AT = 0, CHUNK * K_STRIDE
GAMMA_AT = V_AT + CHUNK * V_STRIDE
A_AT = GAMMA_AT + CHUNK * SQUARE_STRIDE
G_AT = A_AT + CHUNK * SQUARE_STRIDE
BETA_AT, SINCE_AT, SCALE_AT, BARRIER_AT = (G_AT + CHUNK * i for i in (1, 2, 3, 4))
SHARED_WORDS = BARRIER_AT + 2


def program(shape: tuple[int, int, int, int], grouped: bool, *refs) -> None:
    """What a thread does. shape: rows, tokens, key heads, value heads.

    refs: q, k: f32 [B, T, Hk, 128], v: f32 [B, T, Hv, 128], g, beta: f32 [B, T, Hv], count: i32 [B];
    out: U, W: f32 [B, Hv, n, 64, 128], the attention [B, Hv, n, 64, 64], e^Λ and the last row of Γ
    [B, Hv, n, 2, 64]; shared memory. Chunks without a valid token are not written.
    """
    _, length, key_heads, heads = shape
    chunks = -(-length // CHUNK)
    q, k, v, g, beta, count, solved_v, solved_k, attention, factors = map(ptx.global_address, refs[:-1])
    shared = ptx.shared_address(refs[-1])

    thread, unit = ptx.thread_index(), ptx.block_index()
    lane, warp = thread & 31, ptx.shuffle(thread >> 5, 0)
    lane_g, lane_t = lane >> 2, lane & 3
    chunk, head, row = unit % chunks, unit // chunks % heads, unit // (chunks * heads)
    key_head = head // (heads // key_heads) if grouped else head % key_heads
    first = chunk * CHUNK
    (valid,) = ptx.load_ahead(count + (row * 4).widened(), 0, 1)

    def here(base, of_heads, of_head, token):
        """A token's vector of a head."""
        return base + (((row * length + first + token) * of_heads + of_head) * DIM * 4).widened()

    with when(first < valid):
        left = valid - first
        tokens = select(left < CHUNK, left, constant(CHUNK))
        _load(shared, here, (k, key_heads, key_head), (v, heads, head), tokens, thread)
        _decays(shared, g, beta, factors, (row * length + first) * heads + head, heads, tokens, thread, unit)
        ptx.barrier_wait(shared + BARRIER_AT * 4, constant(0))
        ptx.block_sync()

        # ---- Q Kᵀ by warps 0 … 3, K Kᵀ by warps 7 … 4: a quarter of the multiprocessor has equal shares
        is_query = warp < WARPS // 2
        block = select(is_query, warp, constant(WARPS - 1) - warp)
        rows = [block * BLOCK + lane_g + i for i in (0, BLOCK // 2)]
        _overlaps(
            shared, here, (q, key_heads, key_head), attention, rows, block, is_query, tokens, lane, unit
        )
        ptx.block_sync()
        _invert(shared, thread)
        _solve(shared, solved_v, solved_k, warp, lane_g, lane_t, unit)


def _floats(address: Register, words: int, count: int) -> Registers:
    return [w.as_f32() for w in ptx.load_shared(address, words * 4, count)]


def _load(shared, here, keys, values, tokens, thread) -> None:
    """Starts the copies of the chunk's keys and values; rows past the last token are zeros."""
    barrier = shared + BARRIER_AT * 4
    with when(thread.equals(0)):
        ptx.barrier_init(barrier)
        ptx.barrier_fence()
        ptx.barrier_expect(barrier, tokens * (2 * DIM * 4))
    ptx.block_sync()
    targets = ((K_AT, K_STRIDE, keys), (V_AT, V_STRIDE, values))
    with when(thread < tokens):
        for at, stride, source in targets:
            target = shared + thread * (stride * 4) + at * 4
            ptx.bulk_copy_kept(target, here(*source, thread), constant(DIM * 4), barrier)
    with when(both(thread >= tokens, thread < CHUNK)):
        for at, stride, _ in targets:
            for i in range(0, DIM, 4):
                ptx.store_shared(shared + thread * (stride * 4) + at * 4, i * 4, ptx.zeros(4))


def _decays(shared, g, beta, factors, place, heads, tokens, thread, unit) -> None:
    """Γ, e^Λ and the factors of V and K, from the log-decays and β of the chunk.

    A thread sums 16 rows of a column of Γ, one term after the other: a difference of running sums drowns in a
    long decay.
    """
    exp = lambda x: ptx.exp2(x * ptx.LOG2_E)  # noqa: E731
    with when(thread < CHUNK):
        exists = thread < tokens
        at = ((place + thread * heads) * 4).widened()
        for base, target in ((g, G_AT), (beta, BETA_AT)):
            ptx.store_shared(shared + thread * 4, target * 4, ptx.load_ahead_where(exists, base + at, 0, 1))
    ptx.block_sync()
    column, quarter = thread & (CHUNK - 1), thread >> 6
    first = quarter * BLOCK

    def add(row, total):
        (term,) = _floats(shared + row * 4, G_AT, 1)
        return total + select(column < row, term, constant(0.0))

    (total,) = ptx.loop(first, [constant(0.0)], lambda row, carry: [add(row, carry[0])])
    own = factors + (unit * (2 * CHUNK * 4)).widened()
    (newest,) = _floats(shared, G_AT, 1)
    for i in range(BLOCK):
        row = first + i
        total = add(row, total)
        decay = select(row >= column, exp(total), constant(0.0))
        ptx.store_shared(shared + (row * SQUARE_STRIDE + column) * 4, GAMMA_AT * 4, [decay])
        with when(column.equals(0)):
            since = exp(total + newest)
            ptx.store_shared(shared + row * 4, SINCE_AT * 4, [since])
            (strength,) = _floats(shared + row * 4, BETA_AT, 1)
            ptx.store_shared(shared + row * 4, SCALE_AT * 4, [since * strength])
            ptx.store_global(own + (row * 4).widened(), 0, [since])
    with when(first.equals(CHUNK - BLOCK)):
        ptx.store_global(own + (column * 4).widened(), CHUNK * 4, [decay])


def _overlaps(shared, here, queries, attention, rows, block, is_query, tokens, lane, unit) -> None:
    """A warp's 16 rows of (Q Kᵀ) ⊙ Γ, into memory, or of A = β (K Kᵀ) ⊙ Γ below the diagonal, kept."""
    lane_g, lane_t = lane >> 2, lane & 3
    own = [_row_quads(shared, here, queries, row, is_query, tokens, lane_t) for row in rows]
    strength = [_floats(shared + row * 4, BETA_AT, 1)[0] for row in rows]
    target = attention + (unit * (CHUNK * CHUNK * 4)).widened()

    def pair(i, carry):
        """Columns 16i … 16i + 15."""
        sums = [ptx.zeros(4), ptx.zeros(4)]
        for quad in range(0, DIM, BLOCK):
            steps = quad_steps(*(split_all(x[quad // 4 : quad // 4 + 4]) for x in own))
            for half in range(2):
                other = (i * BLOCK + 8 * half + lane_g) * K_STRIDE + lane_t * 4
                terms = split_all(_floats(shared + other * 4, K_AT + quad, 4))
                for step in range(2):
                    sums[half] = multiply_add(sums[half], steps[step], terms[2 * step : 2 * step + 2])
        for half in range(2):
            column = i * BLOCK + 8 * half + lane_t * 2
            for j, row in enumerate(rows):
                place = (row * SQUARE_STRIDE + column) * 4
                decays = _floats(shared + place, GAMMA_AT, 2)
                found = [s * d for s, d in zip(sums[half][2 * j : 2 * j + 2], decays, strict=True)]
                with when(is_query):
                    ptx.store_global(target + ((row * CHUNK + column) * 4).widened(), 0, found)
                with when(is_query.equals(0)):
                    found = [
                        select((column + c) < row, x * strength[j], constant(0.0))
                        for c, x in enumerate(found)
                    ]
                    ptx.store_shared(shared + place, A_AT * 4, found)
        return carry

    ptx.loop(block + 1, [], pair)

    def clear(i, carry):
        for half in range(2):
            for row in rows:
                column = (block + 1 + i) * BLOCK + 8 * half + lane_t * 2
                with when(is_query):
                    ptx.store_global(target + ((row * CHUNK + column) * 4).widened(), 0, ptx.zeros(2))
        return carry

    ptx.loop(constant(CHUNK // BLOCK - 1) - block, [], clear)


def _row_quads(shared, here, queries, row, is_query, tokens, lane_t) -> Registers:
    """Terms 16i + 4t … 16i + 4t + 3 of a row of q, or of k."""
    found = []
    source = here(*queries, row) + (lane_t * 16).widened()
    for quad in range(0, DIM, BLOCK):
        asked = ptx.load_ahead_where(both(is_query, row < tokens), source, quad * 4, 4)
        held = ptx.load_shared(shared + (row * K_STRIDE + lane_t * 4) * 4, (K_AT + quad) * 4, 4)
        found += [select(is_query, a, h).as_f32() for a, h in zip(asked, held, strict=True)]
    return found


def _invert(shared, thread) -> None:
    """(I + A)⁻¹ in the place of Γ, whose upper part is zero already."""

    def at(base, row, column):
        return shared + ((row * SQUARE_STRIDE + column) * 4 + base * 4)

    with when(thread < CHUNK):  # a column of a block of 16 each
        corner, column = (thread >> 4) * BLOCK, thread & (BLOCK - 1)
        x = []
        for i in range(BLOCK):
            below = [w for j in range(0, i, 4) for w in _floats(at(A_AT, corner + i, corner + j), 0, 4)][:i]
            total = select(column.equals(i), constant(1.0), constant(0.0))
            for a, known in zip(below, x, strict=True):
                total = ptx.fma(a * -1.0, known, total)
            x.append(total)
        for i, value in enumerate(x):
            ptx.store_shared(at(GAMMA_AT, corner + i, corner + column), 0, [value])
    ptx.block_sync()
    for size in (BLOCK, 2 * BLOCK):  # corners −Y a₂₁ X of blocks twice as large
        width = size // 8  # columns of a thread
        per_corner = size * size // width
        corner, i, j = (
            thread // per_corner * (2 * size),
            thread % per_corner // (size // width),
            thread % (size // width) * width,
        )
        # the upper right quarter is free: room for a₂₁ X of each corner
        spare = at(GAMMA_AT, corner // 2, constant(CHUNK // 2))
        product = _rows_times(
            at(A_AT, corner + size + i, corner), at(GAMMA_AT, corner, corner + j), size, width
        )
        ptx.store_shared(spare + (i * SQUARE_STRIDE + j) * 4, 0, product)
        ptx.block_sync()
        row = at(GAMMA_AT, corner + size + i, corner + size)
        product = _rows_times(row, spare + j * 4, size, width)
        ptx.store_shared(at(GAMMA_AT, corner + size + i, corner + j), 0, [x * -1.0 for x in product])
        ptx.block_sync()


def _rows_times(row: Register, columns: Register, size: int, width: int) -> Registers:
    """Σ_k row[k] · columns[k, :width], both in shared memory."""
    total = ptx.zeros(width)
    for k in range(0, size, 4):
        for n, factor in enumerate(_floats(row, k, 4)):
            terms = _floats(columns, (k + n) * SQUARE_STRIDE, width)
            total = [ptx.fma(factor, x, t) for x, t in zip(terms, total, strict=True)]
    return total


def _solve(shared, solved_v, solved_k, warp, lane_g, lane_t, unit) -> None:
    """U = (I + A)⁻¹ β V and W = (I + A)⁻¹ β e^Λ K: 32 columns of one of them a warp."""
    is_value = warp < WARPS // 2
    columns = (warp & (WARPS // 2 - 1)) * 32
    stride = select(is_value, constant(V_STRIDE * 4), constant(K_STRIDE * 4))
    source = shared + select(is_value, constant(V_AT * 4), constant(K_AT * 4)) + (columns + lane_g) * 4
    scale = shared + select(is_value, constant(BETA_AT * 4), constant(SCALE_AT * 4))
    blocks = CHUNK // BLOCK
    sums = [[ptx.zeros(4) for _ in range(4)] for _ in range(blocks)]
    for step in range(CHUNK // 8):
        terms = [[], [], [], []]
        for half in range(2):
            token = lane_t + (8 * step + 4 * half)
            (factor,) = _floats(scale + token * 4, 0, 1)
            for n in range(4):
                (x,) = _floats(source + token * stride, 8 * n, 1)
                terms[n].append(split(x * factor))
        for block in range(step // 2, blocks):
            a = [
                split(_floats(shared + ((lane_g + r) * SQUARE_STRIDE + lane_t) * 4, at, 1)[0])
                for at, r in (
                    (GAMMA_AT + block * BLOCK * SQUARE_STRIDE + 8 * step + c, r)
                    for c in (0, 4)
                    for r in (0, 8)
                )
            ]
            for n in range(4):
                sums[block][n] = multiply_add(sums[block][n], a, terms[n])
    target = select(is_value, solved_v, solved_k) + (unit * (CHUNK * DIM * 4)).widened()
    for block in range(blocks):
        for n in range(4):
            for j in range(2):
                place = ((lane_g + (block * BLOCK + 8 * j)) * DIM + columns + 8 * n + lane_t * 2) * 4
                ptx.store_global(target + place.widened(), 0, sums[block][n][2 * j : 2 * j + 2])
