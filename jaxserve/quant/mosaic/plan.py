"""How the decode kernel cuts a matrix into blocks, warps and ring slots.

Nothing here knows how many rows are multiplied, except the room that partial results take: the order of
summation follows from the cut, and a row's bits may not depend on its neighbours.
"""

import dataclasses
from collections.abc import Sequence

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


def max_warps(record_bytes: int) -> int:
    """Warps of a block: registers for 16, and two ring slots each."""
    return min(MAX_WARPS, RING_BYTES // (2 * record_bytes))


def plan(
    row_tiles: int,
    chunks: int,
    record_bytes: int,
    matrices: int = 1,
    unit: int = 1,
    share: int = MULTIPROCESSORS,
) -> Plan:
    """The cheapest cut, by a cost in µs fitted to measurements on an H200.

    With several `matrices` side by side each gets a share of the multiprocessors; K is cut as for one. Every
    `unit` row tiles stay together. share: multiprocessors for this matrix. K is split only where it has more
    chunks than a block has warps: the sum of the splits is a kernel of its own.
    """
    warps = max_warps(record_bytes)
    cuts = [(-(-chunks // splits), splits) for splits in range(1, chunks + 1)]
    cuts = [(c, splits) for c, splits in cuts if c <= warps and -(-chunks // c) == splits]
    if chunks <= warps:
        cuts = [(chunks, 1)]
    spreads = [_spread(row_tiles, *cut, warps, record_bytes, share, unit) for cut in cuts]
    _, best = min(spreads, key=lambda spread: spread[0])
    return _spread(row_tiles, best.chunks, best.splits, warps, record_bytes, share // matrices, unit)[1]


def shares(row_tiles: Sequence[int], tile_bytes: Sequence[int]) -> list[int]:
    """Multiprocessors for matrices that run side by side: as few as let the slowest block end earliest.

    tile_bytes: of a row tile, over all of K.
    """
    most = [count * size for count, size in zip(row_tiles, tile_bytes, strict=True)]
    for limit in sorted(
        {n * size for size in tile_bytes for n in range(1, max(row_tiles) + 1)} | {max(most)}
    ):
        tiles = [max(1, limit // size) for size in tile_bytes]
        found = [-(-count // each) for count, each in zip(row_tiles, tiles, strict=True)]
        if sum(found) <= MULTIPROCESSORS:
            return found
    raise ValueError(f"{len(row_tiles)} matrices are more than the {MULTIPROCESSORS} multiprocessors")


def _spread(
    row_tiles: int,
    chunks: int,
    splits: int,
    warps: int,
    record_bytes: int,
    share: int,
    unit: int,
) -> tuple[float, Plan]:
    """The best spread of row tiles over the blocks that one range of K gets, and its cost."""
    spreads = []
    for row_warps in range(1, warps // chunks + 1):
        groups = max(1, min(share // splits, -(-row_tiles // row_warps)))
        tiles = -(-row_tiles // (groups * unit)) * unit
        p = Plan(chunks, splits, row_warps, tiles, -(-row_tiles // tiles), record_bytes, unit)
        memory = tiles * chunks * record_bytes / MULTIPROCESSOR_BYTES_PER_US
        cost = max(memory, 0.25 * p.tiles_per_warp) + 0.1 * p.tiles_per_warp + 0.005 * row_warps * chunks
        spreads.append((cost + splits * (row_tiles * ROWS * 64 / 3e6 + 0.05), p))
    return min(spreads, key=lambda spread: spread[0])
