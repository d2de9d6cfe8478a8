"""How the wide kernel cuts a product into blocks, warpgroups and ring slots."""

import dataclasses

from jaxserve.quant.mosaic.plan import MULTIPROCESSORS
from jaxserve.quant.mosaic.records import LAYOUTS
from jaxserve.quant.mosaic.slots import BLOCK_BYTES

SHARED_BYTES = 224 * 1024  # of 227 KiB; barriers and counters take 2
T_TILES = (16, 32, 64, 128)
MAX_GROUPS = {16: 5, 32: 5, 64: 5, 128: 3}  # warpgroups of a block, so that the sums and two operands fit


# (of records, of activations, halves of a chunk in one of these), the best first
STAGES = ((3, 3, 2), (3, 2, 2), (2, 2, 2), (2, 3, 1), (2, 2, 1), (1, 2, 1), (1, 1, 1))


@dataclasses.dataclass(frozen=True)
class WidePlan:
    """`splits` ranges of K × row_blocks × tiles of T are blocks of row_groups × k_groups warpgroups."""

    t_tile: int  # rows of x
    row_groups: int  # of 64 rows of W
    k_groups: int
    row_blocks: int
    splits: int
    chunks: int  # of a split
    parts: int  # of activations
    record_bytes: int
    record_stages: int
    operand_stages: int
    halves: int  # of a chunk's activations in a stage: 1 or 2

    @property
    def warps(self) -> int:
        return 4 * self.row_groups * self.k_groups

    @property
    def record_ring_bytes(self) -> int:
        return _rounded(self.warps * self.record_stages * self.record_bytes)

    @property
    def operand_ring_bytes(self) -> int:
        """Sums of k groups pass through it too."""
        stage = self.halves * self.parts * self.t_tile // 8 * BLOCK_BYTES
        ring = self.k_groups * self.operand_stages * stage
        return _rounded(max(ring, (self.k_groups - 1) * self.row_groups * self.t_tile * 64 * 4))

    @property
    def fits(self) -> bool:
        return self.record_ring_bytes + self.operand_ring_bytes <= SHARED_BYTES


def _rounded(nbytes: int) -> int:
    """Shared memory in pieces of 1 KiB keeps every piece aligned."""
    return -(-nbytes // 1024) * 1024


def wide_plan(
    type_name: str, rows: int, row_tiles: int, chunks: int, parts: int, experts: int = 0
) -> WidePlan:
    """The cheapest cut by an estimate in µs. `rows` per expert, of `experts` (0: one matrix)."""
    t_tile = next((t for t in T_TILES if rows <= t), T_TILES[-1])
    tiles = -(-rows // t_tile) * max(1, experts)
    found = []
    for groups in range(1, MAX_GROUPS[t_tile] + 1):
        for row_groups in (r for r in range(1, groups + 1) if groups % r == 0):
            for splits in range(1, 2 if experts else min(chunks, 16) + 1):
                p = _staged(
                    type_name, t_tile, row_groups, groups // row_groups, row_tiles, chunks, splits, parts
                )
                if p is not None:
                    found.append((_cost(p, tiles, row_tiles, rows), p))
    return min(found, key=lambda entry: entry[0])[1]


def _staged(type_name, t_tile, row_groups, k_groups, row_tiles, chunks, splits, parts) -> WidePlan | None:
    of_split = -(-chunks // splits)
    if -(-chunks // of_split) != splits or k_groups > of_split:
        return None
    record, steps = LAYOUTS[type_name].words * 4, -(-of_split // k_groups)
    row_blocks = -(-row_tiles // (4 * row_groups))
    for record_stages, operand_stages, halves in STAGES:
        stages = min(record_stages, steps), min(operand_stages, steps * 2 // halves), halves
        p = WidePlan(t_tile, row_groups, k_groups, row_blocks, splits, of_split, parts, record, *stages)
        if p.fits:
            return p
    return None


def _cost(p: WidePlan, tiles: int, row_tiles: int, rows: int) -> float:
    """µs. Decoding a record occupies a warp scheduler, multiplying it the tensor core."""
    waves = -(-(tiles * p.row_blocks * p.splits) // MULTIPROCESSORS)
    groups, steps = p.row_groups * p.k_groups, -(-p.chunks // p.k_groups)
    decode, tensor = 0.3, 0.0024 * p.t_tile * p.parts
    step = max(groups * max(decode, tensor), 0.8)
    single = 0.5 if min(p.record_stages, p.operand_stages) == 1 and steps > 1 else 0
    partial = p.splits * row_tiles * 16 * rows * 8 / 3.5e6 if p.splits > 1 else 0
    return waves * (steps * (step + single) + 1.5) + (2 if p.splits > 1 else 0) + partial + 0.2 * p.k_groups
