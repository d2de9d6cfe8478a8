"""One token of a gated delta net layer in one launch: what stands between its projections, on Mosaic GPU
(Hopper).

The same as `short_conv`, `l2_normalise`, `expand_heads`, `gates`, `delta_step` and `gated_norm` in turn, in
f32. What it costs is to read the recurrent state once and to write it once.

A cluster of blocks owns one key head of one row: the value heads that read it, their states, their channels
of the convolution. Its warps take tiles of 8 rows of a state and ask for all they need at once. Two things
cross blocks: the sum of squares of a head's output, and the tail of the key head's channels, which every
block reads before it moves on. The squares are sent to every block of the cluster; that all have arrived
tells both, and the states are written meanwhile.

A row has the same bits alone and among others, and on every call: how the tiles are spread over blocks
changes no sum.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve import ptx
from jaxserve.config import Delta
from jaxserve.ops.mosaic import recurrence
from jaxserve.ops.mosaic.launch import MAX_CLUSTER, launch, scratch
from jaxserve.ops.mosaic.recurrence import COLUMNS, LANE_COLUMNS, ROWS
from jaxserve.ptx import Register, Registers, both, constant, select

WARPS = 4  # of a block
MAX_TILES = 4  # of a warp, which keeps them in registers
RESIDENT_BLOCKS = 256  # of an H200, two a multiprocessor
QK_WARPS = COLUMNS // 32  # warps whose lanes hold a channel of q and of k each
SUMS = 3  # over a key head: q · q, k · k, q · k


class Plan(NamedTuple):
    """How the tiles of a key head are spread."""

    cluster: int  # blocks that share them
    warps: int  # of a block
    tiles: int  # of a warp


def plan(config: Delta, batch: int) -> Plan:
    """The most blocks a key head that divide its tiles evenly and, over all rows, are resident at once; where
    none are, the fewest. A block alone only where no cluster divides them.
    """
    tiles = config.value_heads // config.key_heads * config.value_dim // ROWS
    fits = [c for c in range(2, MAX_CLUSTER + 1) if tiles % (c * WARPS) == 0] or [1]
    fits = [c for c in fits if tiles // (c * WARPS) <= MAX_TILES] or fits[-1:]
    resident = [c for c in fits if batch * config.key_heads * c <= RESIDENT_BLOCKS]
    cluster = resident[-1] if resident else fits[0]
    return Plan(cluster, WARPS, tiles // (cluster * WARPS))


def supported(config: Delta) -> bool:
    """Whether the kernel takes heads of these dimensions."""
    return config.key_dim == COLUMNS and config.value_dim % (WARPS * ROWS) == 0


# An inner jit: layers of one shape share one lowering.
@functools.partial(jax.jit, static_argnames=("config", "eps", "spread"))
def decode_delta(
    parts: tuple[jax.Array, ...],
    conv_weight: jax.Array,
    decay: jax.Array,
    decay_bias: jax.Array,
    norm_gain: jax.Array,
    conv: jax.Array,
    delta: jax.Array,
    rank: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    active: jax.Array,
    *,
    config: Delta,
    eps: float,
    spread: Plan | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token for every active lane: the convolution tails and states after it, and what the output
    projection reads, f32 [B, Hv·Dv].

    parts: f32 [B, n], side by side the convolved channels C, z (Hv·Dv), beta (Hv) and alpha (Hv);
    conv_weight: f32 [C, W], decay (−exp(A_log)), decay_bias: f32 [Hv], norm_gain: f32 [Dv];
    conv: f32 [Lr, slots, W-1, C], delta: f32 [Lr, slots, Hv, Dv, Dk], both updated in place where donated;
    rank: i32 [] the layer, rows: i32 [B] distinct slots (slots itself: a spare lane), start: i32 [B] (0: the
    row begins from zeros), active: bool [B]. spread: how to share the work, None: as measured best.

    An inactive or spare lane leaves its slot as it is, bit for bit, and puts out zeros.
    """
    _check(parts, conv_weight, decay, decay_bias, norm_gain, conv, delta, rank, rows, start, active, config)
    batch = rows.shape[0]
    spread = plan(config, batch) if spread is None else spread
    widths = tuple(part.shape[1] for part in parts)
    tiles = config.value_heads // config.key_heads * config.value_dim // ROWS
    (conv, delta), (out,) = launch(
        functools.partial(_program, config, spread, eps, conv.shape[1], widths),
        (conv, delta),
        (rank, rows, start, active, conv_weight, decay, decay_bias, norm_gain, *parts),
        name=f"decode_delta_k{config.key_heads}_v{config.value_heads}_b{batch}",
        blocks=batch * config.key_heads * spread.cluster,
        warps=spread.warps,
        cluster=spread.cluster,
        out_types=[jax.ShapeDtypeStruct((batch, config.value_heads * config.value_dim), jnp.float32)],
        scratch_types=[
            scratch(2 * COLUMNS, jnp.float32),  # q, then k
            scratch(SUMS * QK_WARPS, jnp.float32),  # their sums by warp
            scratch(tiles, jnp.float32),  # squares of the output by tile
            scratch(2, jnp.uint32),  # the mbarrier that counts them
        ],
    )
    return conv, delta, out


def _check(parts, conv_weight, decay, decay_bias, norm_gain, conv, delta, rank, rows, start, active, config):
    d, batch = config, rows.shape[0]
    if not supported(d):
        raise ValueError(
            f"heads of {d.value_dim} × {d.key_dim}: the delta kernel takes a key dim of {COLUMNS} and a "
            f"value dim that is a multiple of {WARPS * ROWS}"
        )
    layers, slots = delta.shape[:2]
    expected = {
        "conv": (conv, (layers, slots, d.conv_width - 1, d.channels), jnp.float32),
        "delta": (delta, (layers, slots, d.value_heads, d.value_dim, d.key_dim), jnp.float32),
        "conv_weight": (conv_weight, (d.channels, d.conv_width), jnp.float32),
        "decay": (decay, (d.value_heads,), jnp.float32),
        "decay_bias": (decay_bias, (d.value_heads,), jnp.float32),
        "norm_gain": (norm_gain, (d.value_dim,), jnp.float32),
        "rank": (rank, (), jnp.int32),
        "rows": (rows, (batch,), jnp.int32),
        "start": (start, (batch,), jnp.int32),
        "active": (active, (batch,), jnp.bool_),
    }
    expected |= {f"parts[{i}]": (p, (batch, p.shape[-1]), jnp.float32) for i, p in enumerate(parts)}
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, expected {jnp.dtype(dtype)}{shape}")
    columns, widths = d.channels + d.value_heads * (d.value_dim + 2), [p.shape[1] for p in parts]
    if sum(widths) != columns:
        raise ValueError(f"parts have {widths} columns, expected {columns} in all")


class _Channel(NamedTuple):
    """What a lane loads for a channel of the convolution."""

    taps: Registers
    window: Registers  # its last inputs, the newest last
    tail: Register  # address of its oldest input


class _Tile(NamedTuple):
    """What a warp loads for a tile of a state; what belongs to a row is that of the row the lane serves."""

    number: Register  # among the tiles of the key head
    state: Register  # address of the lane's columns
    rows: list[Registers]
    v: _Channel
    z: Register
    gain: Register
    out: Register  # address of the row's output
    beta: Register
    alpha: Register
    decay: Register
    bias: Register


def _program(d: Delta, spread: Plan, eps: float, slots: int, widths: tuple[int, ...], *refs) -> None:
    """What a thread does. refs: conv, delta, rank, rows, start, active, conv_weight, decay, decay_bias,
    norm_gain, the parts, the output; in shared memory q and k, their sums, the squares of the output and
    the mbarrier that counts them.
    """
    qk, sums, squares, arrived = (ptx.shared_address(ref) for ref in refs[-4:])
    conv, delta, rank, rows, start, active, weight, decays, biases, gains, *parts, out = (
        ptx.global_address(ref) for ref in refs[:-4]
    )
    taps, heads, channels = d.conv_width, d.value_heads, d.channels
    ratio, head_tiles = heads // d.key_heads, d.value_dim // ROWS
    key_size, outputs = d.key_heads * COLUMNS, heads * d.value_dim
    z0, beta0, alpha0 = channels, channels + outputs, channels + outputs + heads  # columns of the parts

    thread, block = ptx.thread_index(), ptx.block_index()
    lane, warp = thread & 31, ptx.shuffle(thread >> 5, 0)
    member, owner = block % spread.cluster, block // spread.cluster
    key_head, row = owner % d.key_heads, owner // d.key_heads

    is_shared = spread.cluster > 1  # without a cluster there is nobody to send to
    if is_shared:
        with ptx.when(thread.equals(0)):
            ptx.barrier_init(arrived)
            ptx.barrier_fence()
            ptx.barrier_expect(arrived, constant(ratio * head_tiles * 4))
        ptx.cluster_arrive("relaxed")

    # ---- loads
    def word(address, index):
        return ptx.load_ahead(address + (index * 4).widened(), 0, 1)[0]

    def projected(column, first, size):
        """A column of the row's projections that lies in first … first + size."""
        found, offset = None, 0
        for part, width in zip(parts, widths, strict=True):
            if offset < first + size and first < offset + width:
                here = part + ((row * width + column - offset) * 4).widened()
                found = here if found is None else select(column < offset, found, here)
            offset += width
        return ptx.load_ahead(found, 0, 1)[0].as_f32()

    layer, slot, position = ptx.load_ahead(rank, 0, 1)[0], word(rows, row), word(start, row)
    is_live = both(slot < slots, ptx.load_byte_ahead(active + row.widened()) >= 1)
    is_old = both(is_live, position >= 1)
    place = (layer * slots + slot).widened()
    tails, states = conv + place * ((taps - 1) * channels * 4), delta + place * (outputs * COLUMNS * 4)

    def channel(index):
        newest = projected(index, 0, channels)
        kernel = _row(weight + (index * (taps * 4)).widened(), taps)
        tail = tails + (index * 4).widened()
        before = [ptx.load_ahead_where(is_old, tail, j * channels * 4, 1)[0] for j in range(taps - 1)]
        return _Channel(kernel, [*(b.as_f32() for b in before), newest], tail)

    def move_tail(predicate, c):
        for j, value in enumerate(c.window[1:]):
            ptx.store_global_where(predicate, c.tail, j * channels * 4, [value])

    def tile(number):
        of_key_head = number // head_tiles
        head = key_head * ratio + of_key_head if d.grouped else of_key_head * d.key_heads + key_head
        first = head * d.value_dim + number % head_tiles * ROWS
        value = first + recurrence.row_of(lane)
        state = states + first.widened() * (COLUMNS * 4) + (lane * (LANE_COLUMNS * 4)).widened()
        held = [ptx.load_ahead_where(is_old, state, r * COLUMNS * 4, LANE_COLUMNS) for r in range(ROWS)]
        return _Tile(
            number=number,
            state=state,
            rows=[[w.as_f32() for w in r] for r in held],
            v=channel(value + 2 * key_size),
            z=projected(value + z0, z0, outputs),
            gain=word(gains, value % d.value_dim).as_f32(),
            out=out + ((row * outputs + value) * 4).widened(),
            beta=projected(head + beta0, beta0, heads),
            alpha=projected(head + alpha0, alpha0, heads),
            decay=word(decays, head).as_f32(),
            bias=word(biases, head).as_f32(),
        )

    dim = thread % COLUMNS
    first_tile = (member * spread.warps + warp) * spread.tiles
    tiles = [tile(first_tile + j) for j in range(spread.tiles)]
    # q and k are used first: asked for together with the tiles, the compiler would put their use before the
    # tiles' loads. No load crosses a barrier.
    ptx.block_sync()
    keyed = [channel(key_head * COLUMNS + dim + of_all) for of_all in (0, key_size)]

    # ---- the key head's q and k. What several warps or lanes store to one place is the same value.
    q, k = (recurrence.convolve(c.taps, c.window) for c in keyed)
    ptx.store_shared(qk + dim * 4, 0, [q])
    ptx.store_shared(qk + dim * 4, COLUMNS * 4, [k])
    for i, products in enumerate((q * q, k * k, q * k)):
        here = sums + (warp % QK_WARPS) * 4
        ptx.store_shared(here, i * QK_WARPS * 4, [recurrence.warp_sum(products)])
    ptx.block_sync()
    q, k = (_floats(qk + lane * (LANE_COLUMNS * 4), i * COLUMNS * 4, LANE_COLUMNS) for i in range(2))
    squared_q, squared_k, overlap = (_quad_sum(sums, i * QK_WARPS * 4) for i in range(SUMS))
    q_scale = recurrence.inverse_norm(squared_q, eps) * d.key_dim**-0.5
    k_scale = recurrence.inverse_norm(squared_k, eps)
    q, k, overlap = [x * q_scale for x in q], [x * k_scale for x in k], overlap * q_scale * k_scale

    # ---- the warp's tiles
    if is_shared:
        ptx.cluster_wait()  # all blocks have started
    decayed, outputs_, corrections = [], [], []
    for t in tiles:
        v, beta = recurrence.convolve(t.v.taps, t.v.window), recurrence.sigmoid(t.beta)
        decay = recurrence.decay(t.alpha, t.decay, t.bias)
        output, correction = recurrence.tile_step(t.rows, q, k, overlap, v, decay, beta, lane)
        total = recurrence.tile_squares(output)
        here = squares + t.number * 4
        if is_shared:
            with ptx.when(lane < spread.cluster):
                ptx.send_peer(ptx.peer_address(here, lane), [total], ptx.peer_address(arrived, lane))
        else:
            ptx.store_shared(here, 0, [total])
        decayed.append(decay)
        outputs_.append(output)
        corrections.append(correction)
    serves_row = both(lane < 2 * ROWS, (lane & 1).equals(0))
    for t, decay, correction in zip(tiles, decayed, corrections, strict=True):
        for r, values in enumerate(recurrence.tile_update(t.rows, k, decay, correction)):
            ptx.store_global_where(is_live, t.state, r * COLUMNS * 4, values)
        move_tail(both(is_live, serves_row), t.v)

    # ---- all squares are here, so every block has read the tails of q and k
    if is_shared:
        ptx.barrier_wait(arrived, constant(0))
    else:
        ptx.block_sync()
    is_mine = both(is_live, (dim * spread.cluster // COLUMNS).equals(member))
    for c in keyed:
        move_tail(is_mine, c)
    for t, output in zip(tiles, outputs_, strict=True):
        of_head = squares + t.number // head_tiles * (head_tiles * 4)
        quads = [_quad_sum(of_head, i * 4) for i in range(0, head_tiles, 4)]
        mean = functools.reduce(operator.add, quads) * (1 / d.value_dim)
        normed = output * ptx.reciprocal_root(mean + eps) * t.gain * recurrence.silu(t.z)
        ptx.store_global_where(serves_row, t.out, 0, [select(is_live, normed, constant(0.0))])


def _quad_sum(address: Register, offset: int) -> Register:
    """Of four floats in shared memory."""
    a, b, c, d = _floats(address, offset, 4)
    return (a + b) + (c + d)


def _floats(address: Register, offset: int, count: int) -> Registers:
    """Words of shared memory."""
    return [w.as_f32() for w in ptx.load_shared(address, offset, count)]


def _row(address: Register, count: int) -> Registers:
    """Words of memory, in one load where they are a vector."""
    step = count if count in (1, 2, 4) else 1
    words = [w for i in range(0, count, step) for w in ptx.load_ahead(address, i * 4, step)]
    return [w.as_f32() for w in words]
