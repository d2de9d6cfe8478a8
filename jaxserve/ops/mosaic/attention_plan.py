"""How one decode attention is cut and laid out: heads into cells, keys over blocks and warps, columns of the
projections, shared memory. Plain numbers, no arrays.

A cell is one row, one key head and up to eight of the query heads that share it. A cluster of blocks owns a
cell; how many of its blocks work follows from the row's own length, the others leave at once.
"""

import dataclasses
from typing import NamedTuple

from jaxserve.ops.mosaic.attention_tile import HEADS, KEYS, STEP_BYTES

WARPS = 8  # of a block: a tile of 256 columns takes all registers of a thread
MIN_TILES = 4  # of a block before another joins it
# Blocks a cell may have, by cells: more would come in several waves, and even those that leave at once cost.
BLOCKS_BY_CELLS = ((4, 16), (8, 8), (32, 4), (None, 2))
ITEM_BYTES = 16  # of a share: two columns of two heads
STATS_BYTES = HEADS * 8  # of a block's share: each head's largest score and sum of weights


@dataclasses.dataclass(frozen=True)
class Plan:
    blocks: int  # that share a cell at most, a power of two: a cluster
    warps: int  # of a block, a power of two
    group: int  # query heads of a cell
    cells: int  # of a key head; the last one's surplus heads repeat its last

    @property
    def is_cluster(self) -> bool:
        return self.blocks > 1


def plan(batch: int, heads: int, kv_heads: int, capacity: int) -> Plan:
    """For `batch` rows of up to `capacity` keys."""
    shared = heads // kv_heads
    cells = -(-shared // HEADS)
    total = batch * kv_heads * cells
    most = next(blocks for limit, blocks in BLOCKS_BY_CELLS if limit is None or total <= limit)
    blocks = 1 << doublings(-(-capacity // KEYS), most)
    return Plan(blocks, WARPS, -(-shared // cells), cells)


def doublings(tiles: int, cluster: int) -> int:
    """log2 of the blocks that work on so many tiles: as few as leave each MIN_TILES or less, or all."""
    return sum(tiles > most for most in doubling_limits(cluster))


def doubling_limits(cluster: int) -> list[int]:
    """How many tiles 1, 2, 4, … blocks take before their number doubles."""
    return [MIN_TILES << i for i in range(cluster.bit_length() - 1)]


class Place(NamedTuple):
    """Where columns of the projections are."""

    part: int
    offset: int  # in the part
    width: int  # of the part


@dataclasses.dataclass(frozen=True)
class Form:
    """What is static about a launch."""

    plan: Plan
    slots: int
    capacity: int
    heads: int
    kv_heads: int
    dim: int
    dtype: str  # of the cache
    widths: tuple[int, ...]  # columns of each part
    biased: bool
    normed: bool
    rotary: int  # columns of a head that turn; 0: none
    interleaved: bool
    gated: bool
    window: int  # 0: all keys
    scale: float
    eps: float

    @property
    def query_width(self) -> int:
        """Columns of a query head, its gate included."""
        return self.dim * (2 if self.gated else 1)

    @property
    def columns(self) -> dict[str, tuple[int, int]]:
        """First column and columns of q, k and v, side by side."""
        q, kv = self.heads * self.query_width, self.kv_heads * self.dim
        return {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}

    def place(self, name: str) -> Place | None:
        """Of "q", "k" or "v". None: no part holds all of it."""
        first, count = self.columns[name]
        start = 0
        for part, width in enumerate(self.widths):
            if start <= first and first + count <= start + width:
                return Place(part, first - start, width)
            start += width
        return None

    @property
    def threads(self) -> int:
        return 32 * self.plan.warps

    @property
    def items(self) -> int:
        """Of a share: lanes × pairs of columns a lane."""
        return 2 * self.dim


class Shared(NamedTuple):
    """Byte offsets in a block's shared memory, 16-byte aligned."""

    sums: int  # f32 [warps][items][4]
    tops: int  # f32 [8][warps]: largest scores
    totals: int  # f32 [8][warps]: sums of weights
    queries: int  # operands of mma
    token: int  # the new key and value, in the cache's type
    gates: int  # f32 [group][dim]
    peer_sums: int  # f32 [blocks][items of this block + 1][4]: the one more spreads the banks
    peer_stats: int  # f32 [blocks][8][2]
    arrived: int  # mbarrier: the peers' shares are here
    end: int


def shared(form: Form) -> Shared:
    """The layout of a block's shared memory."""
    p, dim = form.plan, form.dim
    sizes = [
        p.warps * form.items * ITEM_BYTES,
        HEADS * p.warps * 4,
        HEADS * p.warps * 4,
        dim // 16 * STEP_BYTES,
        2 * dim * 2,
        form.gated * p.group * dim * 4,
        p.is_cluster * (form.items + p.blocks) * ITEM_BYTES,
        p.is_cluster * p.blocks * STATS_BYTES,
        p.is_cluster * 8,
    ]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 16) * 16)
    return Shared(*offsets)
