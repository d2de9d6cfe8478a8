"""The donated pytree: everything prefill and decode read and write. Fixed shapes, fixed addresses.

One description (`abstract_state`) gives shapes and dtypes; allocation, budgets and compilation all derive
from it.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.params import MAX_LOGPROBS
from jaxserve.sampling import Options, empty_options

MAX_STEPS = 8  # tokens a row can draw in one dispatch of decode
KV_ALIGNMENT = 8  # positions; the GPU's copy engine fetches keys in tiles of so many

IDLE, RUNNING, STOPPED, FULL, BROKEN = range(5)
"""Status of a row. Only RUNNING rows feed tokens; STOPPED drew a stop id, FULL its last allowed token, BROKEN
a non-finite logit.
"""


@chex.dataclass(frozen=True)
class Memory:
    """What the layers remember of the tokens fed. None: the model has no such layers."""

    keys: jax.Array | None  # [La, slots, Hkv, S, D] kv dtype
    values: jax.Array | None  # [La, slots, Hkv, S, D] kv dtype
    delta: jax.Array | None  # [Lr, slots, Hv, Dv, Dk] f32   gated-delta state
    conv: jax.Array | None  # [Lr, slots, W-1, C]     f32   last inputs of the short convolution


@chex.dataclass(frozen=True)
class State:
    """The state of `slots` sequences."""

    memory: Memory
    logits: jax.Array  # [slots, V] f32   at the last token fed by a final prefill or a decode
    history: jax.Array  # [slots, S] i32   tokens fed, by position
    counts: jax.Array  # [slots, V] i32   occurrences in the penalty window (kept by sampled steps only)
    length: jax.Array  # [slots] i32      tokens fed
    token: jax.Array  # [slots] i32       drawn, not fed yet
    status: jax.Array  # [slots] i32
    remaining: jax.Array  # [slots] i32   tokens that may still be drawn
    options: Options  # [slots, …]
    drawn: jax.Array  # [slots, MAX_STEPS] i32   tokens of the row's last dispatch, -1 = none
    logprobs: jax.Array  # [slots, MAX_STEPS, 1 + 16] f32   of the drawn token, then of the most likely ones
    likely: jax.Array  # [slots, MAX_STEPS, 16] i32   ids of the most likely tokens


def abstract_memory(config: ModelConfig, *, slots: int, context: int, kv_dtype: str = "float16") -> Memory:
    """Shapes and dtypes of `Memory` as ShapeDtypeStructs. S is the context, rounded up to KV_ALIGNMENT."""
    attention, recurrent, delta = config.layers_of("attention"), config.layers_of("delta"), config.delta
    capacity = -(-context // KV_ALIGNMENT) * KV_ALIGNMENT
    kv = jax.ShapeDtypeStruct(
        (attention, slots, config.kv_heads, capacity, config.head_dim), jnp.dtype(kv_dtype)
    )
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(jnp.float32))
    return Memory(
        keys=kv if attention else None,
        values=kv if attention else None,
        delta=f32((recurrent, slots, delta.value_heads, delta.value_dim, delta.key_dim))
        if recurrent
        else None,
        conv=f32((recurrent, slots, delta.conv_width - 1, delta.channels)) if recurrent else None,
    )


def abstract_state(config: ModelConfig, *, slots: int, context: int, kv_dtype: str = "float16") -> State:
    """Shapes and dtypes of `State` as ShapeDtypeStructs."""
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(jnp.int32))
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(jnp.float32))
    options = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), empty_options(slots))
    return State(
        memory=abstract_memory(config, slots=slots, context=context, kv_dtype=kv_dtype),
        logits=f32((slots, config.vocab_size)),
        history=i32((slots, context)),
        counts=i32((slots, config.vocab_size)),
        length=i32((slots,)),
        token=i32((slots,)),
        status=i32((slots,)),
        remaining=i32((slots,)),
        options=options,
        drawn=i32((slots, MAX_STEPS)),
        logprobs=f32((slots, MAX_STEPS, 1 + MAX_LOGPROBS)),
        likely=i32((slots, MAX_STEPS, MAX_LOGPROBS)),
    )


def init_state(
    config: ModelConfig, *, slots: int = 1, context: int = 4096, kv_dtype: str = "float16"
) -> State:
    """An empty state: all rows IDLE. Every leaf is its own buffer, so that all of them can be donated."""
    return _zeros(_Abstract.of(abstract_state(config, slots=slots, context=context, kv_dtype=kv_dtype)))


def init_memory(
    config: ModelConfig, *, slots: int = 1, context: int = 4096, kv_dtype: str = "float16"
) -> Memory:
    """An empty memory alone, for teacher-forced scoring."""
    return _zeros(_Abstract.of(abstract_memory(config, slots=slots, context=context, kv_dtype=kv_dtype)))


def part(state: State, names: Iterable[str]) -> State:
    """The state with the fields `names` alone: a program that touches no others costs the host less."""
    return State(**{name: leaf if name in names else None for name, leaf in state.items()})


def joined(state: State, part: State) -> State:
    """The state with the fields that `part` has."""
    return state.replace(**{name: leaf for name, leaf in part.items() if leaf is not None})


def nbytes(tree) -> int:
    """Bytes of all arrays (or ShapeDtypeStructs) of a pytree."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def state_nbytes(
    config: ModelConfig, *, slots: int = 1, context: int = 4096, kv_dtype: str = "float16"
) -> int:
    """Device bytes `init_state` takes."""
    return nbytes(abstract_state(config, slots=slots, context=context, kv_dtype=kv_dtype))


@dataclasses.dataclass(frozen=True)
class _Abstract:
    """A pytree of ShapeDtypeStructs as a hashable static argument."""

    leaves: tuple
    structure: jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, tree) -> "_Abstract":
        leaves, structure = jax.tree.flatten(tree)
        return cls(tuple((x.shape, str(x.dtype)) for x in leaves), structure)


@functools.partial(jax.jit, static_argnums=0)
def _zeros(abstract: _Abstract):
    return jax.tree.unflatten(
        abstract.structure, [jnp.zeros(shape, dtype) for shape, dtype in abstract.leaves]
    )
