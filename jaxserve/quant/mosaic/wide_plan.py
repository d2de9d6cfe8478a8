"""How the wide kernel cuts a product into blocks, warpgroups and ring slots."""

import dataclasses
import itertools

from jaxserve.ops.mosaic.launch import rounded
from jaxserve.quant.mosaic.plan import MULTIPROCESSORS
from jaxserve.quant.mosaic.records import LAYOUTS, ROWS
from jaxserve.quant.mosaic.slots import BLOCK_BYTES

SHARED_BYTES = 224 * 1024  # of 227 KiB; barriers and counters take 2
MAX_GROUPS = {16: 5, 32: 5, 64: 5, 128: 3, 256: 2}  # warpgroups, so that the sums and two operands fit
MAX_SPLITS = 16
# (of records, of activations, halves of a chunk in one of these), the best first
STAGES = ((3, 3, 2), (3, 2, 2), (2, 2, 2), (2, 3, 1), (2, 2, 1))

# Fitted to measurements of Q4_K matrices on an H200, in µs.
CHUNK_US = {16: 0.2, 32: 0.2, 64: 0.4, 128: 0.3, 256: 0.4}  # a chunk's latency, by tile of T
GROUP_US = {16: 0.34, 32: 0.39, 64: 0.43, 128: 0.68, 256: 1.22}  # what each warpgroup adds to it
TENSOR_US = 0.0046  # the least that a warpgroup adds, for each row of x
FIRST_US, NEXT_US = 2.2, 1.2  # of a block, besides its chunks
SUM_US, SUM_BYTES_PER_US = 1.2, 3e6  # of splits, by XLA


@dataclasses.dataclass(frozen=True)
class WidePlan:
    """`splits` ranges of K × `row_blocks` × tiles of T are blocks of row_groups × k_groups warpgroups."""

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
        return rounded(self.warps * self.record_stages * self.record_bytes)

    @property
    def operand_ring_bytes(self) -> int:
        """Sums of k groups pass through it too."""
        stage = self.halves * self.parts * self.t_tile // 8 * BLOCK_BYTES
        ring = self.k_groups * self.operand_stages * stage
        return rounded(max(ring, (self.k_groups - 1) * self.row_groups * self.t_tile * 64 * 4))

    @property
    def shared_bytes(self) -> int:
        return self.record_ring_bytes + self.operand_ring_bytes


def wide_plan(
    type_name: str, rows: int, row_tiles: int, chunks: int, parts: int, experts: int = 0
) -> WidePlan:
    """The cheapest cut of one matrix, or of `experts` of them that share the rows.

    Never split K of experts: their results would need another pass.
    """
    found = []
    for t_tile, most in MAX_GROUPS.items():
        tiles = _tiles(rows, t_tile, experts)
        groups = ((r, k) for r, k in itertools.product(range(1, most + 1), repeat=2) if r * k <= most)
        for (row_groups, k_groups), splits in itertools.product(
            groups, range(1, 2 if experts else min(chunks, MAX_SPLITS) + 1)
        ):
            p = _staged(type_name, t_tile, row_groups, k_groups, row_tiles, chunks, splits, parts)
            if p is not None:
                found.append((_cost(p, type_name, tiles, row_tiles, rows), p))
    return min(found, key=lambda entry: entry[0])[1]


def _tiles(rows, t_tile, experts) -> float:
    """Tiles of T; with experts the expected number, half a tile of each being empty."""
    if not experts:
        return -(-rows // t_tile)
    used = min(rows, experts)
    return used * max(1.0, (rows / used + 3.5) / t_tile + 0.5)


def _staged(type_name, t_tile, row_groups, k_groups, row_tiles, chunks, splits, parts) -> WidePlan | None:
    """With the deepest rings that fit; None where none fit or warpgroups would have nothing to do."""
    of_split = -(-chunks // splits)
    if -(-chunks // of_split) != splits or k_groups > of_split or 4 * (row_groups - 1) >= row_tiles:
        return None
    record, steps = LAYOUTS[type_name].words * 4, -(-of_split // k_groups)
    row_blocks = -(-row_tiles // (4 * row_groups))
    for record_stages, operand_stages, halves in STAGES:
        stages = min(record_stages, steps), min(operand_stages, steps * 2 // halves), halves
        p = WidePlan(t_tile, row_groups, k_groups, row_blocks, splits, of_split, parts, record, *stages)
        if p.shared_bytes <= SHARED_BYTES:
            return p
    return None


def _cost(p: WidePlan, type_name: str, tiles: float, row_tiles: int, rows: int) -> float:
    """µs. Blocks that fit side by side on a multiprocessor fill each other's waits."""
    tensor = TENSOR_US * p.t_tile * p.parts
    group = max(GROUP_US[p.t_tile], tensor) if LAYOUTS[type_name].scales else 0.1 + tensor
    blocks = tiles * p.row_blocks * p.splits / MULTIPROCESSORS  # of one multiprocessor
    registers = 128 * (60 + p.t_tile * 0.85) * p.row_groups * p.k_groups
    together = max(1, min(SHARED_BYTES // p.shared_bytes, int(65536 // registers), -(-blocks // 1)))
    rounds = -(-blocks // together)
    steps, groups = -(-p.chunks // p.k_groups), p.row_groups * p.k_groups
    step = CHUNK_US[p.t_tile] + together * groups * group
    cost = rounds * steps * step + FIRST_US + (rounds - 1) * NEXT_US + 0.002 * p.t_tile * (p.k_groups - 1)
    if p.splits > 1:
        cost += SUM_US + p.splits * row_tiles * ROWS * rows * 8 / SUM_BYTES_PER_US
    return cost
