"""Rows as values: copy one, read it out in blocks, write it back.

Everything that describes the tokens a row was fed moves: keys, values, recurrent state, history, logits.
What belongs to a request stays: options, status, drawn tokens. Reading makes fresh arrays, true copies of
the row at that moment; every other function donates the state and returns it alone, in place.
`f.__wrapped__` is pure.
"""

import functools
from collections.abc import Callable, Iterable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.config import ModelConfig
from jaxserve.state import Memory, State, abstract_memory, nbytes, part

BLOCK_TOKENS = 256  # positions of a block: the unit in which rows leave the device, are shared and come back
BLOCKS_PER_CALL = {"cpu": 1, "gpu": 4}  # that come back in one; on CPU nothing travels
TOUCHED = {  # program → the fields of the state it changes
    "copy_row": ("memory", "logits", "history", "length"),
    "write_blocks": ("memory",),
    "write_end": ("memory", "logits", "history"),
}


@chex.dataclass(frozen=True)
class Recurrent:
    """One row's recurrent state."""

    delta: jax.Array  # [Lr, Hv, Dv, Dk] f32
    conv: jax.Array  # [Lr, W-1, C] f32


@chex.dataclass(frozen=True)
class End:
    """What a row has at its last token only, whatever its length."""

    recurrent: Recurrent | None  # None: the model has no recurrent layers
    logits: jax.Array  # [V] f32


def abstract_block(config: ModelConfig, kv_dtype: str = "float16") -> jax.ShapeDtypeStruct | None:
    """Shape and dtype of a block of keys and values. None: the model has no attention layers."""
    keys = abstract_memory(config, slots=1, context=BLOCK_TOKENS, kv_dtype=kv_dtype).keys
    return None if keys is None else jax.ShapeDtypeStruct((2, *_without_slots(keys).shape), keys.dtype)


def abstract_recurrent(config: ModelConfig) -> Recurrent | None:
    """Shapes and dtypes of a `Recurrent` as ShapeDtypeStructs. None: no recurrent layers."""
    memory = abstract_memory(config, slots=1, context=1)
    if memory.delta is None:
        return None
    return Recurrent(delta=_without_slots(memory.delta), conv=_without_slots(memory.conv))


def abstract_end(config: ModelConfig) -> End:
    """Shapes and dtypes of an `End`."""
    logits = jax.ShapeDtypeStruct((config.vocab_size,), jnp.dtype(jnp.float32))
    return End(recurrent=abstract_recurrent(config), logits=logits)


def snapshot_nbytes(config: ModelConfig, kv_dtype: str = "float16") -> tuple[int, int, int]:
    """Bytes of a block, of a recurrent state and of a row of logits."""
    end = abstract_end(config)
    return tuple(nbytes(tree) for tree in (abstract_block(config, kv_dtype), end.recurrent, end.logits))


@functools.partial(jax.jit, static_argnames="reach", donate_argnums=0)
def copy_row(
    state: State, source: jax.Array, target: jax.Array, length: jax.Array, *, reach: int | None = None
) -> State:
    """Make `target` remember the first `length` tokens of `source`.

    source, target, length: i32 []. reach: cached positions that are copied, at least `length`; None: all. The
    recurrent state and the logits are those `source` has now: of use only where it stands at `length` tokens.
    """
    reach = state.history.shape[1] if reach is None else reach
    put = lambda leaf: leaf.at[target].set(leaf[source])  # noqa: E731
    copy = functools.partial(_copy_slot, source=source, target=target)
    memory = state.memory
    return state.replace(
        memory=Memory(
            keys=copy(memory.keys, reach=reach),
            values=copy(memory.values, reach=reach),
            delta=copy(memory.delta),
            conv=copy(memory.conv),
        ),
        logits=put(state.logits),
        history=put(state.history),
        length=state.length.at[target].set(length),
    )


@jax.jit
def read_block(state: State, slot: jax.Array, start: jax.Array) -> jax.Array:
    """The keys and values at positions start, start + 1, …; zero past the row's end.

    slot, start: i32 [] → [2, La, Hkv, BLOCK_TOKENS, D]: one array, one transfer
    """
    return jnp.stack([_read_window(cache, slot, start) for cache in (state.memory.keys, state.memory.values)])


@jax.jit
def read_end(state: State, slot: jax.Array) -> End:
    """A slot's recurrent state and kept logits.   slot: i32 []"""
    memory, recurrent = state.memory, None
    if memory.delta is not None:
        delta, conv = (
            lax.dynamic_index_in_dim(stack, slot, 1, keepdims=False) for stack in (memory.delta, memory.conv)
        )
        recurrent = Recurrent(delta=delta, conv=conv)
    return End(recurrent=recurrent, logits=state.logits[slot])


@functools.partial(jax.jit, donate_argnums=0)
def write_blocks(
    state: State, slot: jax.Array, start: jax.Array, count: jax.Array, *blocks: jax.Array
) -> State:
    """Put the first `count` positions of blocks that follow each other at start, start + 1, … of a slot; past
    the end they are dropped.

    slot, start, count: i32 [], blocks: [2, La, Hkv, BLOCK_TOKENS, D]
    """
    memory, block = state.memory, jnp.concatenate(blocks, axis=3)
    keys = _write_window(memory.keys, block[0], slot, start, count)
    values = _write_window(memory.values, block[1], slot, start, count)
    return state.replace(memory=memory.replace(keys=keys, values=values))


@functools.partial(jax.jit, donate_argnums=0)
def write_end(state: State, slot: jax.Array, tokens: jax.Array, end: End) -> State:
    """Put what a row has at its last token into a slot, and which tokens it was fed.

    slot: i32 [], tokens: i32 [S], past the row's length anything
    """
    memory = state.memory
    if end.recurrent is not None:
        delta = lax.dynamic_update_index_in_dim(memory.delta, end.recurrent.delta, slot, 1)
        conv = lax.dynamic_update_index_in_dim(memory.conv, end.recurrent.conv, slot, 1)
        memory = memory.replace(delta=delta, conv=conv)
    logits, history = state.logits.at[slot].set(end.logits), state.history.at[slot].set(tokens)
    return state.replace(memory=memory, logits=logits, history=history)


def lowerings(
    state: State, block: jax.Array | None, end: End, *, reaches: Iterable[int], blocks: int = 1
) -> dict[object, Callable[[], jax.stages.Lowered]]:
    """Name → a thunk that lowers the program, for every program a state of these shapes needs. blocks: that
    come back in one call.

    All arguments may be ShapeDtypeStructs. A model without attention layers gets no programs for blocks, a
    single slot none that copy rows.
    """
    i32 = jax.ShapeDtypeStruct((), np.int32)
    tokens = jax.ShapeDtypeStruct(state.history.shape[1:], np.int32)
    touched = {name: part(state, fields) for name, fields in TOUCHED.items()}
    table = {
        "read_end": lambda: read_end.lower(state, i32),
        "write_end": lambda: write_end.lower(touched["write_end"], i32, tokens, end),
    }
    if block is not None:
        table["read_block"] = lambda: read_block.lower(state, i32, i32)
        table["write_blocks"] = lambda: write_blocks.lower(
            touched["write_blocks"], i32, i32, i32, *[block] * blocks
        )
    if state.length.shape[0] > 1:
        for reach in reaches:
            table["copy_row", reach] = functools.partial(
                copy_row.lower, touched["copy_row"], i32, i32, i32, reach=reach
            )
    return table


def _without_slots(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[:1] + leaf.shape[2:], leaf.dtype)


def _copy_slot(stack: jax.Array | None, *, source, target, reach: int | None = None) -> jax.Array | None:
    """stack[:, target] = stack[:, source], of a cache only the first `reach` positions.

    stack: [La, slots, Hkv, S, D] or [Lr, slots, …]. One layer at a time: XLA parks what it copies within an
    array in a temporary.
    """
    if stack is None:
        return None
    size = (1, 1, *stack.shape[2:]) if reach is None else (1, 1, stack.shape[2], reach, stack.shape[4])
    rest = (0,) * (stack.ndim - 2)

    def layer(rank, stack):
        row = lax.dynamic_slice(stack, (rank, source, *rest), size)
        return lax.dynamic_update_slice(stack, row, (rank, target, *rest))

    return lax.fori_loop(0, stack.shape[0], layer, stack)


def _window(cache: jax.Array, slot, start, tokens: int) -> tuple[tuple, tuple, jax.Array]:
    """Where blocks are read and written: moved back inside a row they would stick out of.

    Returns the window's place and size in the cache and its first position.
    """
    layers, _, heads, capacity, dim = cache.shape
    length = min(tokens, capacity)
    first = jnp.minimum(start, capacity - length)
    return (0, slot, 0, first, 0), (layers, 1, heads, length, dim), first


def _read_window(cache: jax.Array, slot, start) -> jax.Array:
    """cache: [La, slots, Hkv, S, D] → [La, Hkv, BLOCK_TOKENS, D]"""
    place, size, first = _window(cache, slot, start, BLOCK_TOKENS)
    held = lax.dynamic_slice(cache, place, size)[:, 0]
    return jnp.take(held, start - first + jnp.arange(BLOCK_TOKENS), axis=2, mode="fill", fill_value=0)


def _write_window(cache: jax.Array, block: jax.Array, slot, start, count) -> jax.Array:
    """cache: [La, slots, Hkv, S, D], block: [La, Hkv, tokens, D]"""
    place, size, first = _window(cache, slot, start, block.shape[2])
    held = lax.dynamic_slice(cache, place, size)[:, 0]
    source = first - start + jnp.arange(size[3])
    new = jnp.take(block, source, axis=2, mode="clip")
    is_new = ((source >= 0) & (source < count))[:, None]
    return lax.dynamic_update_slice(cache, jnp.where(is_new, new, held)[:, None], place)
