"""The arithmetic of a delta net's token as one warp does it, in f32: see `ops/delta.py` for the formulas.

A tile is 8 rows of a head's state [Dv, Dk]: lane l holds columns 4l … 4l+3 of each. What belongs to a row (v,
the correction, the output) is in the lanes of that row: lane l serves row (l // 2) % 8, four lanes alike.
"""

from jaxserve.ptx import (
    LOG2_E,
    Register,
    Registers,
    absolute,
    constant,
    exp2,
    fma,
    maximum,
    reciprocal,
    reciprocal_root,
    select,
    shuffle,
    shuffle_xor,
    sigmoid,
)

ROWS = 8  # of a tile
COLUMNS = 128  # of a tile: the key dim
LANE_COLUMNS = COLUMNS // 32


def row_of(lane: Register) -> Register:
    """The row of a tile that a lane serves."""
    return (lane >> 1) & (ROWS - 1)


def silu(x: Register) -> Register:
    return x * sigmoid(x)


def softplus(x: Register) -> Register:
    """log(1 + eˣ) as max(x, 0) + log1p(e^−|x|), with log1p(y) = 2 artanh(y / (2 + y)): its series keeps the
    relative precision of small values, which a head's slow decay is made of.
    """
    y = exp2(absolute(x) * -LOG2_E)
    s = y * reciprocal(y + 2.0)
    square = s * s
    series = constant(1 / 15)
    for odd in (13, 11, 9, 7, 5, 3, 1):
        series = fma(series, square, constant(1 / odd))
    return fma(s * 2.0, series, maximum(x, constant(0.0)))


def decay(alpha: Register, rate: Register, bias: Register) -> Register:
    """e^(rate · softplus(alpha + bias))."""
    return exp2(rate * softplus(alpha + bias) * LOG2_E)


def convolve(taps: Registers, window: Registers) -> Register:
    """silu(Σ_j taps[j] · window[j]) of one channel."""
    total = taps[0] * window[0]
    for tap, value in zip(taps[1:], window[1:], strict=True):
        total = fma(tap, value, total)
    return silu(total)


def inverse_norm(sum_of_squares: Register, eps: float) -> Register:
    """1 / max(‖x‖, eps)."""
    return reciprocal_root(maximum(sum_of_squares, constant(eps * eps)))


def warp_sum(x: Register) -> Register:
    """Of all lanes, in every lane."""
    for distance in (16, 8, 4, 2, 1):
        x = x + shuffle_xor(x.as_i32(), distance).as_f32()
    return x


def spread_sums(values: Registers, lane: Register) -> Register:
    """The sum over lanes of values[l % 16] in lane l, of 16 values: each exchange halves what is left."""
    for distance in (8, 4, 2, 1):
        is_upper = (lane & distance) >= 1
        low, high = values[:distance], values[distance:]
        kept = [select(is_upper, h, v) for v, h in zip(low, high, strict=True)]
        given = [select(is_upper, v, h) for v, h in zip(low, high, strict=True)]
        values = [k + shuffle_xor(g.as_i32(), distance).as_f32() for k, g in zip(kept, given, strict=True)]
    return values[0] + shuffle_xor(values[0].as_i32(), 16).as_f32()


def tile_step(
    state: list[Registers],
    q: Registers,
    k: Registers,
    overlap: Register,
    v: Register,
    decay: Register,
    beta: Register,
    lane: Register,
) -> tuple[Register, Register]:
    """The output and the correction β (v − e^g S k) of the lane's row, from the old state.

    state: 8 rows × 4 columns, q, k: 4 columns, overlap: k · q; v, decay, beta of the row the lane serves.
    o = e^g S q + correction (k · q): both reads are of the old state.
    """
    reads = [_dot(row, x) for row in state for x in (k, q)]
    mine = spread_sums(reads, lane)
    other = shuffle_xor(mine.as_i32(), 1).as_f32()
    is_odd = (lane & 1) >= 1
    recalled, carried = select(is_odd, other, mine), select(is_odd, mine, other)
    correction = beta * (v - decay * recalled)
    return fma(correction, overlap, decay * carried), correction


def tile_update(
    state: list[Registers], k: Registers, decay: Register, correction: Register
) -> list[Registers]:
    """e^g S + correction ⊗ k."""
    corrections = [shuffle(correction.as_i32(), 2 * row).as_f32() for row in range(ROWS)]
    return [
        [fma(c, key, decay * s) for s, key in zip(row, k, strict=True)]
        for c, row in zip(corrections, state, strict=True)
    ]


def tile_squares(out: Register) -> Register:
    """Σ out² over the rows of a tile, in every lane."""
    total = out * out
    for distance in (2, 4, 8):
        total = total + shuffle_xor(total.as_i32(), distance).as_f32()
    return total


def _dot(a: Registers, b: Registers) -> Register:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = fma(x, y, total)
    return total
