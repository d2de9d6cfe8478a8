"""Sixteen cached keys and values against up to eight queries that share them: what one warp of the decode
attention does with a tile, on the tensor cores.

Lane 4g+t holds keys g and g+8 (columns 8t … 8t+7 of every 32) and, of the values, keys 2t, 2t+1, 2t+8, 2t+9
(columns 8g … 8g+7 of every 64): each load is 16 bytes a lane in whole sectors, and what arrives already is
operand A of mma (a sum does not care about the order of its terms, so the columns may be dealt out so).
The scores K qᵀ come out with a key's row and two heads' columns in a lane; transposed in 8 × 8 blocks the
weights are operand B of Vᵀ w. Queries and weights go in as two halves each, the rounded value and the rest,
so that only the cache itself is rounded.
"""

from collections.abc import Callable

from jaxserve import ptx
from jaxserve.ptx import Register, Registers, constant, select

KEYS = 16  # of a tile: the rows of mma
HEADS = 8  # of a tile: its columns
STEP_BYTES = 512  # of query operands for 16 columns: 32 lanes of (two words of values, two of rests)
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # of two words, as selectors of choose_bytes


def halves(dtype: str) -> tuple[str, Callable, Callable]:
    """How mma calls a cache's type; two f32 → a word of it; a word → two f32."""
    if dtype == "float16":
        return "f16", ptx.pack_f16x2, ptx.unpack_f16x2
    return "bf16", ptx.pack_bf16x2, ptx.unpack_bf16x2


Load = Callable[[Register, int, int], Registers]  # address, offset, words


def key_blocks(dim: int) -> list[tuple[int, int]]:
    """First column and words a lane of the pieces of a key: 32 columns, a last one of 16."""
    return [(c, min(32, dim - c) // 8) for c in range(0, dim, 32)]


def value_blocks(dim: int) -> list[tuple[int, int]]:
    """First column and words a lane of the pieces of a value: 64 columns, then 32, then 16."""
    blocks = [(c, 4) for c in range(0, dim - 63, 64)]
    at = dim // 64 * 64
    for words in (2, 1):
        if dim - at >= 16 * words:
            blocks.append((at, words))
            at += 16 * words
    return blocks


def key_rows(g: Register) -> Registers:
    """Which keys of a tile a lane reads."""
    return [g, g + 8]


def value_rows(t: Register) -> Registers:
    return [t * 2 + i for i in (0, 1, 8, 9)]


def load_row(load: Load, address: Callable[[int], Register], blocks: list[tuple[int, int]]) -> Registers:
    """A lane's words of one row of a cache.   address: of the row's first column for this lane, by the words
    it loads at a time
    """
    return [word for column, words in blocks for word in load(address(words), 2 * column, words)]


def score(keys: list[Registers], query: Register, dtype: str, dim: int) -> Registers:
    """K qᵀ: keys g, g, g+8, g+8 for heads 2t, 2t+1 in turn.

    keys: words of keys g and g+8; query: address of this lane's operands in shared memory
    """
    of, _, _ = halves(dtype)
    chains = [ptx.zeros(4) for _ in range(4)]  # independent sums: one after the other, mma's latency adds up
    near, far = keys
    for step in range(dim // 16):
        a = [near[2 * step], far[2 * step], near[2 * step + 1], far[2 * step + 1]]
        q = ptx.load_shared(query, step * STEP_BYTES, 4)
        for half in range(2):
            chain = 2 * (step % 2) + half
            chains[chain] = ptx.mma(chains[chain], a, q[2 * half : 2 * half + 2], of)
    return [(a + b) + (c + d) for a, b, c, d in zip(*chains, strict=True)]


def weigh(
    scores: Registers, seen: Registers, best: Registers, total: Registers
) -> tuple[Registers, Registers, Registers, Registers]:
    """A step of the running softmax, base 2, for heads 2t, 2t+1 → weights, the factor by which all that came
    before shrinks, best, total.

    scores: of keys g, g, g+8, g+8; seen: whether keys g and g+8 count, some key of the tile does; best:
    largest score, the same in all lanes of a head; total: sum of the weights of this lane's keys
    """
    hidden = constant(float("-inf"))
    scaled = [select(seen[i // 2], scores[i], hidden) for i in range(4)]
    top = []
    for head in range(2):
        m = ptx.maximum(scaled[head], scaled[2 + head])
        for distance in (4, 8, 16):
            m = ptx.maximum(m, ptx.shuffle_xor(m.as_i32(), distance).as_f32())
        top.append(ptx.maximum(best[head], m))
    shrink = [ptx.exp2(b - m) for b, m in zip(best, top, strict=True)]
    weights = [ptx.exp2(scaled[i] - top[i % 2]) for i in range(4)]
    total = [ptx.fma(total[h], shrink[h], weights[h] + weights[2 + h]) for h in range(2)]
    return weights, shrink, top, total


def gather(
    out: list[Registers], weights: Registers, shrink: Registers, values: list[Registers], dtype: str
) -> list[Registers]:
    """out · shrink + Vᵀ w: per word of a value, its two columns for heads 2t, 2t+1 (even column first).

    values: words of keys 2t, 2t+1, 2t+8, 2t+9
    """
    of, pack, unpack = halves(dtype)
    rounded = [pack(*weights[:2]), pack(*weights[2:])]
    rests = [
        pack(*(w - r for w, r in zip(weights[2 * i : 2 * i + 2], unpack(rounded[i]), strict=True)))
        for i in range(2)
    ]
    operands = [[ptx.transpose_8x8(word) for word in half] for half in (rounded, rests)]
    result = []
    for c, *rows in zip(out, *values, strict=True):
        a = [
            ptx.choose_bytes(rows[r], rows[r + 1], half) for r in (0, 2) for half in (LOW_HALVES, HIGH_HALVES)
        ]
        c = [v * shrink[i % 2] for i, v in enumerate(c)]
        result.append(ptx.mma(ptx.mma(c, a, operands[0], of), a, operands[1], of))
    return result
