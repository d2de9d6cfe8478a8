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
# Clusters of so many blocks that surely fit at a time: each lies within a partition of 14 to 18
# multiprocessors, and one cluster too many doubles the time (32 of 4 did).
CLUSTERS = {1: MULTIPROCESSORS, 2: 64, 3: 40, 4: 30, 5: 22, 6: 16, 7: 14, 8: 14}


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
    cluster: int = 1  # blocks that sum their splits among themselves; 1: the splits are summed afterwards

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

    def inbox_bytes(self, tiles_per_flush: int, batch: int) -> int:
        """Of the first block of a cluster, for what the others have summed."""
        return (self.cluster - 1) * tiles_per_flush * self.row_warps * ROWS * 4 * batch

    def tiles_per_flush(self, slot_bytes: int, batch: int) -> int:
        """Tiles of a warp whose partial results (slot_bytes each) fit until the block sums them."""
        room = SHARED_BYTES - self.warps * self.stages * self.record_bytes
        each = self.row_warps * self.chunks * slot_bytes + self.inbox_bytes(1, batch)
        fitting = max(1, min(self.tiles_per_warp, room // each))
        flushes = -(-self.tiles_per_warp // fitting)
        tiles = -(-self.tiles_per_warp // flushes)
        if flushes > 1 and tiles * self.row_warps % self.unit:
            tiles += 1 if tiles < fitting else -1
        return tiles


def plan(row_tiles: int, chunks: int, record_bytes: int, matrices: int = 1, unit: int = 1) -> Plan:
    """The cheapest cut, by a cost in µs fitted to measurements on an H200.

    With several `matrices` side by side each gets a share of the multiprocessors; K is cut as for one. Every
    `unit` row tiles stay together.
    """
    max_warps = min(MAX_WARPS, RING_BYTES // (2 * record_bytes))  # two ring slots each
    cuts = [(-(-chunks // splits), splits) for splits in range(1, chunks + 1)]
    cuts = [(c, splits) for c, splits in cuts if c <= max_warps and -(-chunks // c) == splits]
    cuts = [(*cut, cluster) for cut in cuts for cluster in {1, cut[1]} if cluster in CLUSTERS]
    spreads = [_spread(row_tiles, *cut, max_warps, record_bytes, 1, unit) for cut in cuts]
    _, best = min(spreads, key=lambda spread: spread[0])
    cut = best.chunks, best.splits, best.cluster
    return _spread(row_tiles, *cut, max_warps, record_bytes, matrices, unit)[1]


def _spread(
    row_tiles, chunks, splits, cluster, max_warps, record_bytes, matrices, unit
) -> tuple[float, Plan]:
    """The best spread of row tiles over the blocks that one range of K gets, and its cost."""
    places = MULTIPROCESSORS // splits if cluster == 1 else CLUSTERS[cluster]
    spreads = []
    for row_warps in range(1, max_warps // chunks + 1):
        groups = max(1, min(places // matrices, -(-row_tiles // row_warps)))
        tiles = -(-row_tiles // (groups * unit)) * unit
        p = Plan(chunks, splits, row_warps, tiles, -(-row_tiles // tiles), record_bytes, unit, cluster)
        memory = tiles * chunks * record_bytes / MULTIPROCESSOR_BYTES_PER_US
        cost = max(memory, 0.25 * p.tiles_per_warp) + 0.1 * p.tiles_per_warp + 0.005 * row_warps * chunks
        spreads.append((cost + _sum_cost(p, row_tiles), p))
    return min(spreads, key=lambda spread: spread[0])


def _sum_cost(p: Plan, row_tiles: int) -> float:
    """Of summing the splits: messages within a cluster, or 8 columns through memory and another kernel."""
    if p.splits == 1:
        return 0.0
    if p.cluster > 1:
        return 0.8 + 0.1 * p.splits
    return 1.2 + p.splits * (row_tiles * ROWS * 64 / 3e6 + 0.05)
