"""Which shapes the step is compiled for: a few sizes that every request is padded to."""

import dataclasses

CHUNKS = {"cpu": (32, 256), "gpu": (64, 128, 512)}  # tokens of a prefill call, by platform
FIRST_REACH = 1024  # cached positions a short row's decode step looks at; larger reaches grow by REACH_FACTOR
REACH_FACTOR = 4
SCORE_CHUNK = 64  # tokens of a teacher-forced call: its logits are [64, V] f32
# Decode steps of a call, by platform: (bytes that one reads, at most, and steps); of so many lanes at most.
# There a step takes the device less than twice as long as the host.
BURSTS = {"gpu": ((2.5e9, 4), (8e9, 2))}
BURST_LANES = 8


def chunk_sizes(platform: str) -> tuple[int, ...]:
    """Tokens of a prefill call on a JAX platform ("cpu", "gpu"), ascending."""
    return CHUNKS.get(platform, CHUNKS["gpu"])


def burst_steps(platform: str, step_nbytes: int, *, one_reach: bool) -> int:
    """The most decode steps of a call: several where a step reads so little that the host would be late.
    With more than one reach a step is slower, and the programs would become too many.
    """
    sizes = BURSTS.get(platform, ()) if one_reach else ()
    return next((steps for limit, steps in sizes if step_nbytes <= limit), 1)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The compiled sizes of an engine, ascending."""

    chunks: tuple[int, ...]
    reaches: tuple[int, ...]
    lanes: tuple[int, ...]
    burst: int = 1  # steps of a decode call of few lanes, if not one

    @classmethod
    def of(
        cls,
        context: int,
        slots: int,
        platform: str,
        *,
        pinned: bool = False,
        one_reach: bool = False,
        step_nbytes: int,
    ) -> "Buckets":
        """Sizes for a context, a number of slots and a JAX platform ("cpu", "gpu").

        pinned: one number of lanes, one step a call; one_reach: attention needs no choice of reaches;
        step_nbytes: weights that a decode step of one row reads.
        """
        chunks = tuple(size for size in chunk_sizes(platform) if size < context) or (context,)
        reaches, reach = [], FIRST_REACH
        while reach < context and not one_reach:
            reaches.append(reach)
            reach *= REACH_FACTOR
        lanes, lane = [], 1
        while lane < slots and not pinned:
            lanes.append(lane)
            lane *= 2
        burst = 1 if pinned else burst_steps(platform, step_nbytes, one_reach=one_reach)
        return cls(chunks, (*reaches, context), (*lanes, slots), burst)

    def chunk(self, remaining: int) -> int:
        """The size of the next prefill call: the largest that the rest of the prompt fills to more than half,
        else the smallest.
        """
        return next((size for size in reversed(self.chunks) if remaining > size // 2), self.chunks[0])

    def reach(self, length: int) -> int:
        """The smallest reach that covers `length` cached positions."""
        return _ceiling(self.reaches, length)

    def lane(self, rows: int) -> int:
        """The smallest number of lanes that holds `rows` rows."""
        return _ceiling(self.lanes, rows)

    def steps(self, lanes: int) -> tuple[int, ...]:
        """How many steps a decode call of so many lanes may take, ascending."""
        return (1, self.burst) if self.burst > 1 and lanes <= BURST_LANES else (1,)


def _ceiling(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
