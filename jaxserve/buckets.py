"""Which shapes the step is compiled for: a few sizes that every request is padded to."""

import dataclasses

CHUNKS = {"cpu": (32, 256), "gpu": (64, 128, 512)}  # tokens of a prefill call, by platform
FIRST_REACH = 1024  # cached positions a short row's decode step looks at; larger reaches grow by REACH_FACTOR
REACH_FACTOR = 4
SCORE_CHUNK = 64  # tokens of a teacher-forced call: its logits are [64, V] f32


def chunk_sizes(platform: str) -> tuple[int, ...]:
    """Tokens of a prefill call on a JAX platform ("cpu", "gpu"), ascending."""
    return CHUNKS.get(platform, CHUNKS["gpu"])


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The compiled sizes of an engine, ascending."""

    chunks: tuple[int, ...]
    reaches: tuple[int, ...]
    lanes: tuple[int, ...]

    @classmethod
    def of(
        cls, context: int, slots: int, platform: str, *, pinned: bool = False, one_reach: bool = False
    ) -> "Buckets":
        """Sizes for a context, a number of slots and a JAX platform ("cpu", "gpu"). pinned: one of lanes;
        one_reach: attention needs no choice of reaches.
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
        return cls(chunks, (*reaches, context), (*lanes, slots))

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


def _ceiling(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
