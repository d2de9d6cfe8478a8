"""Prefill and decode: the only place that jits and donates.

Every function takes the state, donates it and returns it first; nothing else the engine needs per token comes
out. The host sees tokens through `peek`, which copies a few integers into a small mailbox of its own.
`f.__wrapped__` is the pure function.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve import sampling
from jaxserve.config import ModelConfig
from jaxserve.models.forward import hidden_states, logits
from jaxserve.models.mixers import Span
from jaxserve.models.weights import Weights
from jaxserve.params import MAX_LOGPROBS
from jaxserve.sampling import Options
from jaxserve.state import BROKEN, FULL, IDLE, MAX_STEPS, RUNNING, STOPPED, Memory, State

UNLIMITED = np.int32(2**31 - 1)
TOUCHED = {  # program → the fields of the state it needs, where that is not all
    "admit": ("status", "remaining", "options"),
    "halt": ("status", "length"),
    ("hit", False): ("logits", "length", "token", "status", "remaining", "options", "drawn"),
    ("hit", True): tuple(field.name for field in dataclasses.fields(State) if field.name != "memory"),
}


@functools.partial(jax.jit, donate_argnums=0)
def admit(state: State, slot: jax.Array, options: Options, limit: jax.Array = UNLIMITED) -> State:
    """Give a slot its sampling options and the number of tokens it may draw. What the slot remembers stays.

    slot, limit: i32 [], options: one row (`sampling.options`). The row is IDLE until a final prefill draws
    its first token.
    """
    put = lambda leaf, row: leaf.at[slot].set(row)  # noqa: E731
    return state.replace(
        options=jax.tree.map(put, state.options, options),
        remaining=put(state.remaining, limit),
        status=put(state.status, IDLE),
    )


@functools.partial(jax.jit, static_argnames=("config", "final"), donate_argnums=1)
def prefill(
    weights: Weights,
    state: State,
    tokens: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    config: ModelConfig,
    final: bool,
) -> State:
    """Feed the first `count` of T tokens at positions start, start + 1, … of a slot.

    tokens: i32 [T] with T ≤ S, slot, start, count: i32 []. final: keep the last token's logits and draw the
    first token from them, whatever the slot's options. Padding writes nothing.
    """
    span = Span(*(x.reshape(1) for x in (slot, start, count)))
    memory, x = hidden_states(weights, state.memory, tokens[None], span, config=config, reach=0)
    state = state.replace(
        memory=memory,
        history=_write_history(state.history, tokens, slot, start, count),
        length=state.length.at[slot].set(start + count),
    )
    if not final:
        return state
    last = lax.dynamic_index_in_dim(x[0], jnp.maximum(count - 1, 0), keepdims=True)
    state = state.replace(logits=state.logits.at[span.rows].set(logits(weights, last, config=config)))
    return _first_draw(state, slot)


@functools.partial(jax.jit, static_argnames=("config", "steps", "sampled", "reach"), donate_argnums=1)
def decode(
    weights: Weights,
    state: State,
    rows: jax.Array,
    *,
    config: ModelConfig,
    steps: int = 1,
    sampled: bool = False,
    reach: int | None = None,
) -> State:
    """Feed each RUNNING row's drawn token and draw the next, `steps` times.

    rows: i32 [B] distinct slots; `slots` itself marks an idle lane. sampled: some row needs more than an
    argmax (penalties, a random draw, log-probabilities). reach: cached positions attention looks at, at least
    the longest row; None: all.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps={steps}: expected 1 ≤ steps ≤ {MAX_STEPS}")
    reach = state.history.shape[1] if reach is None else reach
    state = state.replace(drawn=state.drawn.at[rows].set(-1, mode="drop"))
    step = functools.partial(_decode_one, weights, rows, config=config, sampled=sampled, reach=reach)
    if steps == 1:
        return step(state, 0)
    return lax.fori_loop(0, steps, lambda i, state: step(state, i), state)


# keep_unused: the mailbox is not read, only its place is used
@functools.partial(jax.jit, static_argnames="sampled", donate_argnums=(0, 1), keep_unused=True)
def hit(
    state: State, mailbox: jax.Array, request: jax.Array, *, sampled: bool = True
) -> tuple[State, jax.Array]:
    """`admit` a request whose whole prompt a slot remembers, draw its first token from the logits kept there,
    and `peek`.

    request: `sampling.pack(slot, limit, length, options=…)`, length: tokens of the prompt. sampled: the row
    needs more than an argmax (penalties, a draw, log-probabilities).
    """
    (slot, limit, length), options = sampling.unpack(request)
    state = admit.__wrapped__(state, slot, options, limit)
    state = _first_draw(state.replace(length=state.length.at[slot].set(length)), slot, sampled=sampled)
    return state, peek.__wrapped__(mailbox, *peeked(state))


# keep_unused: as above
@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def peek(
    mailbox: jax.Array, status: jax.Array, drawn: jax.Array, logprobs: jax.Array, likely: jax.Array
) -> jax.Array:
    """What the host reads, one copy: per slot its status and the tokens of its last dispatch, and in a wide
    mailbox their log-probabilities (as bits).

    mailbox: i32 [slots, 1 + MAX_STEPS] or [slots, wide] (`mailbox_width`); the others are leaves of the state
    (`peeked`): all of it would cost the host some microseconds a leaf.
    """
    parts = [status[:, None], drawn]
    if mailbox.shape[1] > 1 + MAX_STEPS:
        slots = mailbox.shape[0]
        bits = lax.bitcast_convert_type(logprobs, jnp.int32)
        parts += [bits.reshape(slots, -1), likely.reshape(slots, -1)]
    return jnp.concatenate(parts, axis=1)


def peeked(state: State) -> tuple:
    """What `peek` takes behind the mailbox."""
    return state.status, state.drawn, state.logprobs, state.likely


def mailbox_width(wide: bool) -> int:
    """Columns of a mailbox."""
    return 1 + MAX_STEPS + (MAX_STEPS * (1 + 2 * MAX_LOGPROBS) if wide else 0)


@functools.partial(jax.jit, donate_argnums=0)
def halt(state: State, slot: jax.Array, length: jax.Array) -> State:
    """Freeze a slot and cut what counts as fed to `length` tokens.   slot, length: i32 []"""
    return state.replace(status=state.status.at[slot].set(IDLE), length=state.length.at[slot].min(length))


@functools.partial(jax.jit, static_argnames="config", donate_argnums=1)
def score(
    weights: Weights,
    memory: Memory,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    config: ModelConfig,
) -> tuple[Memory, jax.Array]:
    """Teacher forcing: feed a chunk into a one-slot memory and return the logits of every position.   tokens:
    i32 [T] → f32 [T, V]
    """
    span = Span(jnp.zeros(1, jnp.int32), *(x.reshape(1) for x in (start, count)))
    memory, x = hidden_states(weights, memory, tokens[None], span, config=config, reach=0)
    return memory, logits(weights, x[0], config=config)


def _decode_one(
    weights: Weights, rows: jax.Array, state: State, index, *, config: ModelConfig, sampled: bool, reach: int
) -> State:
    slots, capacity = state.history.shape
    row = lambda leaf: leaf.at[rows].get(mode="clip")  # noqa: E731  (an idle lane reads some row and writes none)
    length = row(state.length)
    active = (rows < slots) & (row(state.status) == RUNNING) & (length < capacity)
    token = row(state.token)
    span = Span(jnp.minimum(rows, slots - 1), length, active.astype(jnp.int32))
    memory, x = hidden_states(weights, state.memory, token[:, None], span, config=config, reach=reach)
    target = jnp.where(active, rows, slots)
    put = lambda leaf, new: leaf.at[target].set(new, mode="drop", unique_indices=True)  # noqa: E731
    if sampled:
        counts = sampling.slide_counts(
            row(state.counts), row(state.history), length, row(state.options.window), token, active
        )
        state = state.replace(counts=put(state.counts, counts))
    state = state.replace(
        memory=memory,
        history=state.history.at[target, length].set(token, mode="drop", unique_indices=True),
        length=put(state.length, length + 1),
        logits=put(state.logits, logits(weights, x[:, 0], config=config)),
    )
    return _draw(state, rows, active, index, sampled=sampled)


def _draw(state: State, rows: jax.Array, active: jax.Array, index, *, sampled: bool) -> State:
    """Draw the next token of the active rows from their kept logits, and decide whether they go on."""
    slots = state.status.shape[0]
    row = lambda leaf: leaf.at[rows].get(mode="clip")  # noqa: E731
    target = jnp.where(active, rows, slots)
    put = lambda leaf, new: leaf.at[target].set(new, mode="drop", unique_indices=True)  # noqa: E731
    now = lambda leaf, new: leaf.at[target, index].set(new, mode="drop", unique_indices=True)  # noqa: E731
    with jax.named_scope("sampling"):
        raw, options = row(state.logits), jax.tree.map(row, state.options)
        if sampled:
            token = sampling.draw(raw, row(state.counts), options, row(state.length))
            own, ids, values = sampling.log_probabilities(raw, token)
            state = state.replace(
                logprobs=now(state.logprobs, jnp.concatenate([own[:, None], values], axis=1)),
                likely=now(state.likely, ids),
            )
        else:
            token = sampling.greedy(raw)
        remaining = row(state.remaining) - 1
        status = jnp.where(remaining > 0, RUNNING, FULL)
        status = jnp.where(sampling.is_stop(options, token), STOPPED, status)
        status = jnp.where(jnp.isfinite(raw).all(axis=-1), status, BROKEN)
        return state.replace(
            token=put(state.token, token),
            drawn=now(state.drawn, token),
            status=put(state.status, status),
            remaining=put(state.remaining, remaining),
        )


def _first_draw(state: State, slot: jax.Array, *, sampled: bool = True) -> State:
    """Draw a row's first token from the logits kept where its prompt ends."""
    rows = slot.reshape(1)
    state = state.replace(drawn=state.drawn.at[rows].set(-1))
    if sampled:
        length, window = state.length[rows], state.options.window[rows]
        counts = sampling.window_counts(state.history[rows], length, window, state.counts.shape[1])
        state = state.replace(counts=state.counts.at[rows].set(counts))
    return _draw(state, rows, jnp.ones(1, bool), 0, sampled=sampled)


def _write_history(history: jax.Array, tokens: jax.Array, slot, start, count) -> jax.Array:
    """tokens[:count] at history[slot, start:], positions past the end dropped."""
    offset = jnp.arange(tokens.shape[0])
    position = jnp.where(offset < count, start + offset, history.shape[1])
    return history.at[slot, position].set(tokens, mode="drop", unique_indices=True)
