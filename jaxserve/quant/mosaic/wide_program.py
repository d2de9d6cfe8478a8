"""What a thread of the wide kernel does (`wide.py` says why)."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxserve import ptx
from jaxserve.ptx import Register, Registers, both, constant, select, when
from jaxserve.quant.mosaic.products import STEPS, lane_constants
from jaxserve.quant.mosaic.records import ROWS
from jaxserve.quant.mosaic.slots import BLOCK_BYTES, CORE_BYTES, HALF_STEPS
from jaxserve.quant.mosaic.weights import TENSOR_SHIFT, tensor_weights
from jaxserve.quant.mosaic.wide_plan import WidePlan

STEP_BYTES = 2 * CORE_BYTES  # of 8 rows of activations
GROUP_STEPS = 4  # decoded while the last ones are multiplied


class Tile(NamedTuple):
    """Which rows of x a block multiplies with which matrix."""

    matrix: Register
    first: Register  # a multiple of 8
    start: Register  # rows start ≤ t < end are written
    end: Register


class Problem(NamedTuple):
    """What is known when the kernel is traced."""

    type_name: str
    plan: WidePlan
    rows: int  # of x
    row_blocks: int  # of x, 8 rows each
    row_tiles: int  # of W
    chunks: int

    @property
    def operand_type(self) -> str:
        return operand_type(self.type_name)


class Refs(NamedTuple):
    """Memory: activations and their inverse factors, records, output; two rings, barriers, counters."""

    operand: object
    inverse: object
    records: object
    out: object
    operand_ring: object
    record_ring: object
    barriers: object
    counters: object


def operand_type(type_name: str) -> str:
    return "bf16" if type_name == "BF16" else "f16"


class Block:
    """One thread's view of its block. Its warpgroup has 64 rows of W and every k_groups-th chunk."""

    def __init__(self, problem: Problem, refs: Refs, tile: Tile, row_block: Register, split: Register):
        p = problem.plan
        self.problem, self.refs, self.tile, self.split = problem, refs, tile, split
        self.thread = ptx.thread_index()
        lane, self.warp = self.thread & 31, ptx.shuffle(self.thread >> 5, 0)
        self.lanes, self.is_first_lane = lane_constants(problem.type_name, lane), lane.equals(0)
        self.group = self.warp >> 2
        self.row_group, self.k_group = self.group % p.row_groups, self.group // p.row_groups
        self.row_tile = (row_block * p.row_groups + self.row_group) * 4 + (self.warp & 3)
        self.exists = self.row_tile < problem.row_tiles  # the others multiply what they find
        begin, stop = split * p.chunks + self.k_group, (split + 1) * p.chunks
        stop = select(stop < problem.chunks, stop, constant(problem.chunks))
        rounded = stop - begin + (p.k_groups - 1)
        self.count = select(begin < stop, rounded // p.k_groups, constant(0))  # chunks

        # a stage of activations holds `halves` halves of a chunk, in `parts` numbers each
        self.stages_of_chunk, self.stage_steps = 2 // p.halves, p.halves * HALF_STEPS
        self.half_bytes = p.t_tile // 8 * BLOCK_BYTES
        self.stage_bytes = p.halves * p.parts * self.half_bytes
        self.operand_ring = ptx.shared_address(refs.operand_ring) + self.k_group * (
            p.operand_stages * self.stage_bytes
        )
        self.counters = ptx.shared_address(refs.counters) + self.k_group * (p.operand_stages * 4)
        first_row_block = tile.first // 8
        present = constant(problem.row_blocks) - first_row_block
        present = select(present < p.t_tile // 8, present, constant(p.t_tile // 8))
        self.operand_bytes = present * BLOCK_BYTES  # of a half, all that there is
        at = (begin * (2 * problem.row_blocks) + first_row_block).widened() * BLOCK_BYTES
        self.operand = ptx.global_address(refs.operand) + at

        self.record_ring = ptx.shared_address(refs.record_ring) + self.warp * (
            p.record_stages * p.record_bytes
        )
        row = tile.matrix.widened() * problem.row_tiles
        row = row + select(self.exists, self.row_tile, constant(0)).widened()
        at = (row * problem.chunks + begin.widened()) * p.record_bytes
        self.records = ptx.global_address(refs.records) + at

        barriers = ptx.shared_address(refs.barriers)
        self.operand_barriers = barriers + self.k_group * (p.operand_stages * 8)
        self.record_barriers = barriers + (self.warp * p.record_stages + p.k_groups * p.operand_stages) * 8

    def run(self) -> None:
        p = self.problem.plan
        self.start_copies()
        record = self.wait_for_record(constant(0), constant(0) < self.count)
        first = _group(tensor_weights(self.problem.type_name, record, self.lanes))
        acc = ptx.zeros(p.t_tile // 2)
        acc = ptx.held(ptx.loop(self.count, acc + first, self.chunk)[: len(acc)])
        if p.k_groups > 1:
            acc = self.sum_over_k_groups(acc)
        self.write(acc)

    # ---- copies

    def start_copies(self) -> None:
        """A record for every warp, then activations, then the other records: the loop may begin early."""
        p = self.problem.plan
        is_leader = both(self.row_group.equals(0), (self.warp & 3).equals(0))
        with when(self.is_first_lane):
            for i in range(p.record_stages):
                ptx.barrier_init(self.record_barriers + i * 8)
            with when(is_leader):
                for i in range(p.operand_stages):
                    ptx.barrier_init(self.operand_barriers + i * 8)
                    ptx.store_shared(self.counters, 4 * i, [constant(0)])
            ptx.barrier_fence()
            self.fetch_first_record(0)
            with when(is_leader):
                for i in range(p.operand_stages):
                    with when(constant(i) < self.count * self.stages_of_chunk):
                        self.fetch_operand(constant(i))
        ptx.block_sync()
        with when(self.is_first_lane):
            for i in range(1, p.record_stages):
                self.fetch_first_record(i)

    def fetch_first_record(self, i: int) -> None:
        with when(both(self.exists, constant(i) < self.count)):
            self.fetch_record(constant(i))

    def fetch_record(self, i: Register) -> None:
        """Starts the copy of this warp's record of chunk i into its slot."""
        p, slot = self.problem.plan, i % self.problem.plan.record_stages
        source = self.records + i.widened() * (p.k_groups * p.record_bytes)
        target = self.record_ring + slot * p.record_bytes
        ptx.bulk_copy(target, source, p.record_bytes, self.record_barriers + slot * 8)

    def wait_for_record(self, i: Register, is_there: Register) -> Register:
        """Its address, once it has arrived."""
        p, slot = self.problem.plan, i % self.problem.plan.record_stages
        with when(both(self.exists, is_there)):
            ptx.barrier_wait(self.record_barriers + slot * 8, i // p.record_stages & 1)
        return self.record_ring + slot * p.record_bytes

    def fetch_operand(self, stage: Register) -> None:
        """Starts the copies of the activations of a stage, counted from the first chunk, into its slot."""
        problem, p = self.problem, self.problem.plan
        slot = stage % p.operand_stages
        barrier, target = self.operand_barriers + slot * 8, self.operand_ring + slot * self.stage_bytes
        ptx.barrier_expect(barrier, self.operand_bytes * (p.halves * p.parts))
        half = stage // self.stages_of_chunk * (2 * p.k_groups) + stage % self.stages_of_chunk
        source = self.operand + half.widened() * (problem.row_blocks * BLOCK_BYTES)
        for part in range(p.parts):
            for h in range(p.halves):
                at = source + (part * 2 * problem.chunks + h) * problem.row_blocks * BLOCK_BYTES
                to = target + (part * p.halves + h) * self.half_bytes
                ptx.bulk_copy_kept(to, at, self.operand_bytes, barrier)

    def wait_for_operand(self, stage: Register) -> Register:
        """Its descriptor, once it has arrived."""
        p, slot = self.problem.plan, stage % self.problem.plan.operand_stages
        ptx.barrier_wait(self.operand_barriers + slot * 8, stage // p.operand_stages & 1)
        return ptx.wgmma_descriptor(self.operand_ring + slot * self.stage_bytes, CORE_BYTES, BLOCK_BYTES)

    def release_operand(self, stage: Register) -> None:
        """This warp is done with a stage; the last one that is fetches what comes next into its slot."""
        p = self.problem.plan
        users, ahead = p.row_groups * 4, stage + p.operand_stages
        with when(self.is_first_lane):
            before = ptx.add_shared(self.counters + stage % p.operand_stages * 4, 1)
            is_last = (before % users).equals(users - 1)
            with when(both(is_last, ahead < self.count * self.stages_of_chunk)):
                self.fetch_operand(ahead)

    # ---- products

    def chunk(self, i: Register, carry: Registers) -> Registers:
        """Sums and the first group of chunk i → the sums with it, and the first group of chunk i + 1."""
        p = self.problem.plan
        acc, group = carry[: p.t_tile // 2], carry[p.t_tile // 2 :]
        # Into the slot of record i − 1, only now: wgmma has consumed what was decoded from it.
        ahead = i + (p.record_stages - 1)
        with when(both(both(self.is_first_lane, self.exists), both(i >= 1, ahead < self.count))):
            self.fetch_record(ahead)
        record = self.record_ring + i % p.record_stages * p.record_bytes
        steps = tensor_weights(self.problem.type_name, record, self.lanes, first=GROUP_STEPS)
        for first in range(0, STEPS, GROUP_STEPS):
            stage, within = i * self.stages_of_chunk + first // self.stage_steps, first % self.stage_steps
            if within == 0:
                descriptor = self.wait_for_operand(stage)
            if first + GROUP_STEPS == STEPS:  # of a chunk that does not exist it decodes whatever there is
                record = self.wait_for_record(i + 1, i + 1 < self.count)
                steps = tensor_weights(self.problem.type_name, record, self.lanes)
            acc = self.start_group(acc, group, descriptor, within)
            group = _group(steps)
            # Nothing may be in flight when the loop turns: ptxas would wait after every wgmma.
            ptx.wgmma_wait(0)
            if within + GROUP_STEPS == self.stage_steps:
                self.release_operand(stage)
        return acc + group

    def start_group(self, acc: Registers, group: Registers, descriptor: Register, within: int) -> Registers:
        """The sums that a group of steps will have added to, once it is waited for."""
        p = self.problem.plan
        ptx.wgmma_fence()
        for s in range(GROUP_STEPS):
            for part in range(p.parts):
                half, step = divmod(within + s, HALF_STEPS)
                offset = (part * p.halves + half) * self.half_bytes + step * STEP_BYTES
                operand = descriptor + offset // 16
                acc = ptx.wgmma(acc, group[4 * s : 4 * s + 4], operand, self.problem.operand_type)
        ptx.wgmma_commit()
        return acc

    def sum_over_k_groups(self, acc: Registers) -> Registers:
        """The sums of k group 0 plus those of the others in turn, through the ring of activations."""
        p, nbytes = self.problem.plan, len(acc) * 128 * 4
        ptx.block_sync()
        at = ptx.shared_address(self.refs.operand_ring) + (self.thread & 127) * 4
        with when(self.k_group >= 1):
            for i, value in enumerate(acc):
                ptx.store_shared(at + (self.group - p.row_groups) * nbytes, 512 * i, [value])
        ptx.block_sync()
        for other in range(p.k_groups - 1):
            place = at + (self.row_group + other * p.row_groups) * nbytes
            acc = [a + ptx.load_shared(place, 512 * i, 1)[0].as_f32() for i, a in enumerate(acc)]
        return acc

    def write(self, acc: Registers) -> None:
        problem, p, n = self.problem, self.problem.plan, self.problem.row_tiles * ROWS
        inverses, out = ptx.global_address(self.refs.inverse), ptx.global_address(self.refs.out)
        row = (self.row_tile * ROWS + self.lanes.g).widened()
        with when(both(self.exists, self.k_group.equals(0))):
            for column in range(p.t_tile // 8):
                for i in range(2):
                    t = self.tile.first + (column * 8 + i) + self.lanes.t * 2
                    with when(both(t >= self.tile.start, t < self.tile.end)):
                        (inverse,) = ptx.load_global(inverses + (t * 4).widened(), 0, 1)
                        factor = inverse.as_f32() * 2.0 ** -TENSOR_SHIFT[problem.type_name]
                        at = out + ((self.split * problem.rows + t).widened() * n + row) * 4
                        for half in range(2):
                            ptx.store_global(at, 32 * half, [acc[4 * column + 2 * half + i] * factor])


def _group(steps: Iterator[Registers]) -> Registers:
    """The operands A of the next GROUP_STEPS steps, decoded here and not later."""
    return ptx.held([register for _ in range(GROUP_STEPS) for register in next(steps)])
