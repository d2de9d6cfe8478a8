"""The delta rule from chunk to chunk: the second of two prefill kernels.

A block of 8 warps carries 32 rows of one value head's state through all chunks. With the letters of
`ops.delta.delta_chunked`, N = U − W Sᵀ, O = e^Λ Q Sᵀ + ((Q Kᵀ) ⊙ Γ) N, S ← e^Λlast S + (Γlast N)ᵀ K, all
transposed so that S [Dk, 32] stays where the tensor core adds to it: 16 keys a warp. Warps 0 … 3 compute N
from 16 tokens of W each, warps 4 … 7 O from 16 tokens of Q. What a warp multiplies from the left it alone
needs: that goes from memory into its registers, one chunk ahead.
"""

from jaxserve import ptx
from jaxserve.ops.mosaic.delta_chunks import BLOCK, CHUNK, DIM, WARPS
from jaxserve.ops.mosaic.tf32 import multiply_add, quad_steps, split_all
from jaxserve.ptx import Registers, both, constant, select, when

SLICE = 32  # rows of a state, columns of its transpose
TILES = SLICE // 8
STATE_STRIDE, NEW_STRIDE = DIM + 16, SLICE + 2  # words: they spread a warp's reads over the banks
NEW_AT = SLICE * STATE_STRIDE
DECAYED_AT = NEW_AT + CHUNK * NEW_STRIDE
SHARED_WORDS = DECAYED_AT + CHUNK * NEW_STRIDE
ROLES = WARPS // 2


def program(shape: tuple[int, int, int, int], grouped: bool, *refs) -> None:
    """What a thread does. shape: rows, tokens, key heads, value heads.

    refs: state f32 [B, Hv, 128, 128], q, k, count and what `delta_chunks.program` put out; out: o f32
    [B, T, Hv, 128] (zero where no token is valid), the state after the last one; shared memory.
    """
    _, length, key_heads, heads = shape
    chunks, slices = -(-length // CHUNK), DIM // SLICE
    state, q, k, count, solved_v, solved_k, attention, factors, out, after = map(
        ptx.global_address, refs[:-1]
    )
    shared = ptx.shared_address(refs[-1])

    thread, block = ptx.thread_index(), ptx.block_index()
    lane, warp = thread & 31, ptx.shuffle(thread >> 5, 0)
    lane_g, lane_t = lane >> 2, lane & 3
    part, head, row = block % slices, block // slices % heads, block // (slices * heads)
    key_head = head // (heads // key_heads) if grouped else head % key_heads
    (valid,) = ptx.load_ahead(count + (row * 4).widened(), 0, 1)
    live = (valid + (CHUNK - 1)) // CHUNK
    is_query = warp >= ROLES
    tokens = [(warp & (ROLES - 1)) * BLOCK + lane_g + i for i in (0, 8)]  # of a chunk, that the lane serves
    keys = warp * BLOCK + lane_g  # and 8 more: rows of the transposed state
    columns = part * SLICE + lane_t * 2  # of a tile: 8 more each

    def vector(base, of_heads, of_head, token):
        return base + (((row * length + token) * of_heads + of_head) * DIM * 4).widened()

    # ---- loads
    def left_rows(chunk):
        """16 rows of W, or of Q: terms 16i + 4t … 16i + 4t + 3."""
        unit, found = (row * heads + head) * chunks + chunk, []
        for token in tokens:
            solved = solved_k + ((unit * CHUNK + token) * (DIM * 4)).widened()
            position = chunk * CHUNK + token
            source = select(is_query, vector(q, key_heads, key_head, position), solved)
            exists = both(chunk < live, position < valid)
            at = source + (lane_t * 16).widened()
            for i in range(0, DIM, BLOCK):
                found += ptx.load_ahead_where(exists, at, i * 4, 4)
        return [w.as_f32() for w in found]

    def rest(chunk):
        """U or the attention, Kᵀ, the factors of the lane's tokens, the decay over the chunk."""
        unit, found = (row * heads + head) * chunks + chunk, []
        is_live = chunk < live
        for token in tokens:
            at = attention + (((unit * CHUNK + token) * CHUNK + lane_t * 4) * 4).widened()
            for i in range(0, CHUNK, BLOCK):
                found += ptx.load_ahead_where(both(is_live, is_query), at, i * 4, 4)
            at = solved_v + (((unit * CHUNK + token) * DIM + columns) * 4).widened()
            for j in range(TILES):
                found += ptx.load_ahead_where(both(is_live, is_query.equals(0)), at, 8 * j * 4, 2)
        for i in range(0, CHUNK, BLOCK):
            for n in range(4):
                position = chunk * CHUNK + i + lane_t * 4 + n
                at = vector(k, key_heads, key_head, position) + (keys * 4).widened()
                exists = both(is_live, position < valid)
                found += [ptx.load_ahead_where(exists, at, 8 * j * 4, 1)[0] for j in range(2)]
        own = factors + (unit * (2 * CHUNK * 4)).widened()
        which = select(is_query, constant(0), constant(CHUNK))
        for token in tokens:
            found += ptx.load_ahead_where(is_live, own + ((which + token) * 4).widened(), 0, 1)
        found += ptx.load_ahead_where(is_live, own, (CHUNK - 1) * 4, 1)
        return [w.as_f32() for w in found]

    sums = []
    for j in range(TILES):
        for key in (keys, keys + 8):
            at = ((row * heads + head) * DIM + columns + 8 * j) * DIM + key
            for c in range(2):
                sums += ptx.load_ahead(state + ((at + c * DIM) * 4).widened(), 0, 1)
    sums = [w.as_f32() for w in sums]

    sizes = [len(sums), len(tokens) * DIM // 4]

    def step(chunk, carry):
        s, left, more = carry[: sizes[0]], carry[sizes[0] : sum(sizes)], carry[sum(sizes) :]
        for j in range(TILES):
            for i in range(4):
                at = (lane_t * 2 + (8 * j + i % 2)) * STATE_STRIDE + keys + 8 * (i // 2)
                ptx.store_shared(shared + at * 4, 0, [s[4 * j + i]])
        ptx.block_sync()
        read = _left_times_state(shared, left, lane_g, lane_t)
        left = left_rows(chunk + 1)
        per_token = CHUNK // 4 + 2 * TILES
        rows, more = [more[i * per_token : (i + 1) * per_token] for i in range(2)], more[2 * per_token :]
        transposed, (*scales, over) = more[: CHUNK // 2], more[CHUNK // 2 :]
        weights, solved = [r[: CHUNK // 4] for r in rows], [r[CHUNK // 4 :] for r in rows]

        with when(is_query.equals(0)):
            for j in range(TILES):
                for i, token in enumerate(tokens):
                    at = shared + (token * NEW_STRIDE + lane_t * 2 + 8 * j) * 4
                    new = [solved[i][2 * j + c] - read[j][2 * i + c] for c in range(2)]
                    ptx.store_shared(at, NEW_AT * 4, new)
                    ptx.store_shared(at, DECAYED_AT * 4, [x * scales[i] for x in new])
        ptx.block_sync()
        with when(is_query):
            o = [[x * scales[i // 2] for i, x in enumerate(tile)] for tile in read]
            for quad in range(0, CHUNK, BLOCK):
                steps = quad_steps(*(split_all(w[quad // 4 : quad // 4 + 4]) for w in weights))
                o = _add_tokens(shared, NEW_AT, o, steps, quad, lane_g, lane_t)
            for i, token in enumerate(tokens):
                position = chunk * CHUNK + token
                at = vector(out, heads, head, position) + (columns * 4).widened()
                for j in range(TILES):
                    ptx.store_global_where(position < length, at, 8 * j * 4, o[j][2 * i : 2 * i + 2])
        s = [[x * over for x in s[4 * j : 4 * j + 4]] for j in range(TILES)]
        for quad in range(0, CHUNK, BLOCK):
            terms = split_all(transposed[quad // 2 : quad // 2 + 8])  # keys g and g+8 of four tokens
            s = _add_tokens(shared, DECAYED_AT, s, [terms[:4], terms[4:]], quad, lane_g, lane_t)
        return [x for tile in s for x in tile] + left + rest(chunk + 1)

    first = constant(0)
    carry = ptx.loop(live, sums + left_rows(first) + rest(first), step)
    sums = carry[: sizes[0]]
    for j in range(TILES):
        for i, key in enumerate((keys, keys + 8)):
            at = ((row * heads + head) * DIM + columns + 8 * j) * DIM + key
            for c in range(2):
                ptx.store_global(after + ((at + c * DIM) * 4).widened(), 0, [sums[4 * j + 2 * i + c]])

    def clear(i, carry):
        position = (live + i) * CHUNK + (thread >> 2)
        at = vector(out, heads, head, position) + ((part * SLICE + (thread & 3) * 8) * 4).widened()
        for j in range(2):
            ptx.store_global_where(position < length, at, 16 * j, ptx.zeros(4))
        return carry

    ptx.loop(constant(chunks) - live, [], clear)


def _left_times_state(shared, left: Registers, lane_g, lane_t) -> list[Registers]:
    """16 rows times the transposed state: 4 tiles of 8 columns."""
    tiles, half = [ptx.zeros(4) for _ in range(TILES)], len(left) // 2
    for i in range(DIM // BLOCK):
        steps = quad_steps(*(split_all(left[h + 4 * i : h + 4 * i + 4]) for h in (0, half)))
        for j in range(TILES):
            at = (lane_g + 8 * j) * STATE_STRIDE + lane_t * 4
            terms = split_all([w.as_f32() for w in ptx.load_shared(shared + at * 4, i * BLOCK * 4, 4)])
            for step in range(2):
                tiles[j] = multiply_add(tiles[j], steps[step], terms[2 * step : 2 * step + 2])
    return tiles


def _add_tokens(shared, base: int, tiles, steps, quad: int, lane_g, lane_t) -> list[Registers]:
    """tiles + a @ N for tokens quad … quad + 15, of which a lane holds 4t … 4t + 3."""
    found = []
    for j, tile in enumerate(tiles):
        at = shared + ((lane_t * 4 + quad) * NEW_STRIDE + lane_g + 8 * j) * 4
        terms = split_all([ptx.load_shared(at, (base + n * NEW_STRIDE) * 4, 1)[0].as_f32() for n in range(4)])
        for step in range(2):
            tile = multiply_add(tile, steps[step], terms[2 * step : 2 * step + 2])
        found.append(tile)
    return found
