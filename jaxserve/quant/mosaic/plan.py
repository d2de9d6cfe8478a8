"""How the decode kernel cuts a matrix into blocks, warps and ring slots.

Nothing here knows how many rows are multiplied, except the room that partial results take: the order of
summation follows from the cut, and a row's bits may not depend on its neighbours.
"""

import dataclasses

from jaxserve.quant.mosaic.records import ROWS

MULTIPROCESSORS = 132  # H100 SXM, H200; with fewer, blocks come in two waves
MAX_WARPS = 16  # of a block, so that each may use 128 registers
SHARED_BYTES = 215 * 1024  # of 227 KiB
RING_BYTES = SHARED_BYTES * 2 // 3  # the rest is for partial results
MULTIPROCESSOR_BYTES_PER_US = 31e3  # its share of the memory's bandwidth


@dataclasses.dataclass(frozen=True)
class Plan:
    """`splits` ranges of K × `groups` of row tiles are blocks; a block has row_warps × chunks warps."""

    chunks: int  # of a block; the last split may have fewer
    splits: int
    row_warps: int  # warps that share a chunk, each every row_warps-th row tile
    tiles: int  # row tiles of a block
    groups: int
    record_bytes: int
    unit: int = 1  # row tiles that must meet in one flush

    @property
    def blocks(self) -> int:
        return self.groups * self.splits

    @property
    def warps(self) -> int:
        """Whole warpgroups; those beyond row_warps × chunks idle."""
        return -(-self.row_warps * self.chunks // 4) * 4

    @property
    def tiles_per_warp(self) -> int:
        return -(-self.tiles // self.row_warps)

    @property
    def stages(self) -> int:
        """Slots of a warp's ring; more only delay a short run and gain a long one nothing."""
        fitting = RING_BYTES // (self.warps * self.record_bytes)
        return max(1, min(3 if self.tiles_per_warp > 8 else 2, self.tiles_per_warp, fitting))

    def tiles_per_flush(self, slot_bytes: int) -> int:
        """Tiles of a warp whose partial results (slot_bytes each) fit until the block sums them."""
        room = SHARED_BYTES - self.warps * self.stages * self.record_bytes
        fitting = max(1, min(self.tiles_per_warp, room // (self.row_warps * self.chunks * slot_bytes)))
        flushes = -(-self.tiles_per_warp // fitting)
        tiles = -(-self.tiles_per_warp // flushes)
        if flushes > 1 and tiles * self.row_warps % self.unit:
            tiles += 1 if tiles < fitting else -1
        return tiles


def plan(row_tiles: int, chunks: int, record_bytes: int, matrices: int = 1, unit: int = 1) -> Plan:
    """The cheapest cut, by a cost in µs fitted to measurements on an H200.

    K is split only where it has more chunks than a block has warps: a sum over splits is a kernel of its own.
    With several `matrices` side by side each gets a share of the multiprocessors; K is cut as for one. Every
    `unit` row tiles stay together.
    """
    max_warps = min(MAX_WARPS, RING_BYTES // (2 * record_bytes))  # two ring slots each
    cuts = [(-(-chunks // splits), splits) for splits in range(1, chunks + 1)]
    cuts = [(c, splits) for c, splits in cuts if c <= max_warps and -(-chunks // c) == splits]
    if chunks <= max_warps:
        cuts = [(chunks, 1)]
    spreads = [_spread(row_tiles, *cut, max_warps, record_bytes, 1, unit) for cut in cuts]
    _, best = min(spreads, key=lambda spread: spread[0])
    return _spread(row_tiles, best.chunks, best.splits, max_warps, record_bytes, matrices, unit)[1]


def _spread(row_tiles, chunks, splits, max_warps, record_bytes, matrices, unit) -> tuple[float, Plan]:
    """The best spread of row tiles over the blocks that one range of K gets, and its cost."""
    spreads = []
    for row_warps in range(1, max_warps // chunks + 1):
        groups = max(1, min(MULTIPROCESSORS // (splits * matrices), -(-row_tiles // row_warps)))
        tiles = -(-row_tiles // (groups * unit)) * unit
        p = Plan(chunks, splits, row_warps, tiles, -(-row_tiles // tiles), record_bytes, unit)
        memory = tiles * chunks * record_bytes / MULTIPROCESSOR_BYTES_PER_US
        cost = max(memory, 0.25 * p.tiles_per_warp) + 0.1 * p.tiles_per_warp + 0.005 * row_warps * chunks
        spreads.append((cost + splits * (row_tiles * ROWS * 64 / 3e6 + 0.05), p))
    return min(spreads, key=lambda spread: spread[0])
