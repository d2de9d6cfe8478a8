"""What fits on the device: how slots, context and bytes relate."""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.errors import OutOfMemory
from jaxserve.gguf.reader import GGUFFile
from jaxserve.models.weights import free_host_memory, resolve_mode
from jaxserve.state import state_nbytes

MAX_SLOTS = {"cpu": 8, "gpu": 64}  # that "auto" chooses, by platform; a few cores are busy with a few rows
STATE_SHARE = {
    "cpu": 0.25,
    "gpu": 0.8,
}  # of what is free: programs need temporaries, a host has other users
SPAN = 1024  # tokens between which the cost of one is measured: more than any alignment


@dataclasses.dataclass(frozen=True)
class SlotCost:
    """Bytes that one slot of a model takes, from the shapes of its state."""

    config: ModelConfig
    kv_dtype: str

    def nbytes(self, context: int) -> int:
        """Of a slot whose sequence may have `context` tokens."""
        of = functools.partial(state_nbytes, self.config, context=context, kv_dtype=self.kv_dtype)
        return of(slots=2) - of(slots=1)

    @property
    def token(self) -> int:
        """What one more token of context costs: its keys and values, and its id."""
        return (self.nbytes(2 * SPAN) - self.nbytes(SPAN)) // SPAN

    @property
    def fixed(self) -> int:
        """What a slot costs whatever its context: recurrent state, logits, counts, options."""
        return self.nbytes(SPAN) - SPAN * self.token

    def slots(self, context: int, available: int) -> int:
        """How many slots fit into `available` bytes."""
        return max(0, available) // self.nbytes(context)


def auto_slots(cost: SlotCost, context: int, free: int, platform: str) -> int:
    """The slots that `slots="auto"` means: as many as fit, a power of two, so that a little more or less free
    memory gives the same number.

    free: bytes that are free once the weights are there; platform: JAX's name of it ("cpu", "gpu").
    """
    most = MAX_SLOTS.get(platform, MAX_SLOTS["gpu"])
    share = STATE_SHARE.get(platform, STATE_SHARE["gpu"])
    fitting = cost.slots(context, int(free * share))
    return min(most, 1 << max(0, fitting.bit_length() - 1))


def plan(cost: SlotCost, contexts: Iterable[int], free: int, platform: str) -> list[dict[str, int]]:
    """For each context what a slot takes, how many fit into `free` bytes, and how many "auto" chooses."""
    return [
        {
            "context": context,
            "slot_bytes": cost.nbytes(context),
            "slots_that_fit": cost.slots(context, free),
            "slots_auto": auto_slots(cost, context, free, platform),
        }
        for context in contexts
    ]


def free_memory(device: jax.Device) -> int:
    """Bytes that can still be allocated on a device; on CPU what the host could hand out."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return free_host_memory()


def check_memory(file: GGUFFile, config: ModelConfig, weights: str, **shape) -> None:
    """Refuse before anything is allocated what cannot fit. shape: as for `state_nbytes`."""
    if resolve_mode(weights, file) == "packed":
        needed = file.nbytes
    else:
        needed = 4 * sum(int(np.prod(tensor.shape)) for tensor in file.tensors.values())
    needed += state_nbytes(config, **shape)
    available = free_memory(jax.devices()[0])
    if needed > available:
        raise OutOfMemory(needed, available)
