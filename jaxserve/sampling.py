"""On-device sampling: penalties, filters and the draw, for B rows that each bring their own options.

Everything here is part of the decode step that the GPU replays as one graph, so nothing sorts the vocabulary
and nothing loops: a filter is a threshold on the logits, found by an unrolled radix search (`_threshold`).
A row's token depends on its own logits, counts, options and position only, not on its place or neighbours.
"""

import functools
from collections.abc import Iterable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.params import MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams

WHOLE_CONTEXT = 2**31 - 1  # tokens; the window of repeat_last_n = -1
RADIX_BITS = 4  # of a threshold settled per pass; 8 passes, each one reduction over the vocabulary
SUM_BLOCK = 256  # tokens; masses are summed in two stages: rounding grows with V/256 + 256 instead of V
LOWEST_KEY = -(2**31)
SEGMENT = 1024
FLOAT32 = np.finfo(np.float32)
REALS = ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")


@chex.dataclass(frozen=True)
class Options:
    """Sampling options of B rows, packed into few leaves; one row alone has no leading axis."""

    reals: jax.Array  # [B, 6] f32   the fields named in REALS
    integers: jax.Array  # [B, 4] i32   top_k (0 = off), penalty window, low and high half of the seed
    stops: jax.Array  # [B, 64] i32  stop ids, -1 = none

    def real(self, name: str) -> jax.Array:
        """The field of that name, to be broadcast over a vocabulary. [B, 1] f32"""
        return self.reals[..., REALS.index(name), None]

    @property
    def is_greedy(self) -> jax.Array:
        """Whether the draw is an argmax. [B] bool; a temperature that f32 flushes to zero counts as 0."""
        return (self.real("temperature")[..., 0] < FLOAT32.tiny) | (self.integers[..., 0] == 1)

    @property
    def window(self) -> jax.Array:
        """How many of the latest tokens the penalties look at. [B] i32"""
        return self.integers[..., 1]


def options(params: SamplingParams, *, end_ids: Iterable[int] = (), seed: int, vocab_size: int) -> Options:
    """One row of NumPy arrays. `end_ids` are the model's own stop ids; `seed` stands in for `params.seed`."""
    ids = list(dict.fromkeys([*params.stop_tokens, *(() if params.ignore_eos else end_ids)]))
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop id {token} is outside the vocabulary: expected 0 ≤ id < {vocab_size:,}")
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(
            f"{len(ids)} distinct stop ids together with the model's own, the limit is {MAX_STOP_IDS}: "
            "pass fewer stop_tokens"
        )
    integers = (
        params.top_k if params.top_k < vocab_size else 0,
        WHOLE_CONTEXT if params.repeat_last_n < 0 else min(params.repeat_last_n, WHOLE_CONTEXT),
    )
    halves = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    return Options(
        reals=np.clip([getattr(params, name) for name in REALS], FLOAT32.min, FLOAT32.max).astype(np.float32),
        integers=np.concatenate([np.array(integers, np.int32), halves]),
        stops=np.array(ids + [-1] * (MAX_STOP_IDS - len(ids)), np.int32),
    )


def pack(*integers: int, options: Options) -> np.ndarray:
    """One row of options and some integers as one array: each array of its own takes the host some
    microseconds. [74 + n] i32
    """
    row = (options.reals.view(np.int32), options.integers, options.stops, np.array(integers, np.int32))
    return np.concatenate(row)


def unpack(packed: jax.Array) -> tuple[jax.Array, Options]:
    """The integers and the options that `pack` got."""
    reals, integers, stops, rest = jnp.split(packed, np.cumsum([len(REALS), 4, MAX_STOP_IDS]))
    return rest, Options(reals=lax.bitcast_convert_type(reals, jnp.float32), integers=integers, stops=stops)


def empty_options(rows: int) -> Options:
    """The defaults (greedy, no penalties, no stop ids) in every one of `rows` rows."""
    row = options(SamplingParams(), seed=0, vocab_size=1)
    return jax.tree.map(lambda leaf: jnp.tile(leaf, (rows, 1)), row)


def window_counts(history: jax.Array, length: jax.Array, window: jax.Array, vocab_size: int) -> jax.Array:
    """How often each token occurs among the last `window` tokens of history[:length].

    history: [..., S] i32, length, window: [...] i32 -> [..., V] i32
    """
    position = jnp.arange(history.shape[-1])
    length, window = jnp.asarray(length)[..., None], jnp.asarray(window)[..., None]
    is_inside = (position < length) & (position >= length - window)
    token = jnp.where(is_inside, history, vocab_size)  # past the end: dropped

    def count(tokens):
        return jnp.zeros(vocab_size, jnp.int32).at[tokens].add(1, mode="drop")

    return jnp.vectorize(count, signature="(s)->(v)")(token)


def slide_counts(
    counts: jax.Array,
    history: jax.Array,
    length: jax.Array,
    window: jax.Array,
    token: jax.Array,
    active: jax.Array,
) -> jax.Array:
    """`window_counts` of history[:length] -> those after `token` is appended at position `length`.

    Two updates per row: `token` enters, history[length - window] leaves. Rows not `active` stay as they are.
    counts: [B, V] i32, history: [B, S] i32 (already holding `token` or not), the others [B]
    """
    oldest = jnp.maximum(length - window, 0)[:, None]
    leaving = jnp.take_along_axis(history, oldest, axis=-1, mode="clip")[:, 0]
    enters = active & (window > 0)
    leaves = enters & (length >= window)
    nowhere = counts.shape[-1]  # past the end: dropped
    token, leaving = jnp.where(enters, token, nowhere), jnp.where(leaves, leaving, nowhere)
    rows = jnp.arange(counts.shape[0])[:, None]
    change = jnp.array([1, -1], jnp.int32)
    return counts.at[rows, jnp.stack([token, leaving], axis=-1)].add(change, mode="drop")


def penalise(logits: jax.Array, counts: jax.Array, options: Options) -> jax.Array:
    """Lower what was seen: repeat and presence once per distinct token, frequency once per occurrence.

    A seen logit becomes (x / r if x > 0 else x · r) − presence − frequency · count; others stay.
    NaN becomes −inf (never drawn) and +inf the largest float.
    logits: [B, V], counts: [B, V] i32 -> [B, V] f32
    """
    logits, repeat = logits.astype(jnp.float32), options.real("repeat_penalty")
    seen = jnp.where(logits > 0, logits / repeat, logits * repeat)
    seen = seen - options.real("presence_penalty") - options.real("frequency_penalty") * counts
    logits = jnp.where(counts > 0, seen, logits)
    return jnp.nan_to_num(logits, nan=-jnp.inf, posinf=FLOAT32.max, neginf=-jnp.inf)


def draw(logits: jax.Array, counts: jax.Array, options: Options, position: jax.Array) -> jax.Array:
    """The whole pipeline: penalties, temperature, top-k, top-p, min-p, draw.

    logits: [B, V], counts: [B, V] i32 (`window_counts`), position: [B] i32 (the drawn token's) -> [B] i32
    """
    logits = penalise(logits, counts, options)
    return _choose(logits, filtered_weights(logits, options), options, position)


def draw_reference(logits: jax.Array, counts: jax.Array, options: Options, position: jax.Array) -> jax.Array:
    """`draw` with a sorted vocabulary: plain, and slow."""
    logits = penalise(logits, counts, options)
    return _choose(logits, filtered_weights_reference(logits, options), options, position)


def filtered_weights(logits: jax.Array, options: Options) -> jax.Array:
    """Probabilities relative to the top token's (which has 1); 0 where a filter takes the token out.

    In order: temperature, top-k, top-p over what top-k left, min-p. Tokens tied with the last kept one stay.
    logits: [B, V] f32, without NaN or +inf -> [B, V] f32
    """
    weights = _weights(logits, options)
    top_k, top_p = options.integers[..., 0, None], options.real("top_p")
    keys = _ordered_keys(logits)
    with jax.named_scope("top_k"):
        # counts are exact in f32 up to 2^24 tokens
        kth = _threshold(keys, jnp.ones_like(weights), top_k.astype(jnp.float32))
        weights = jnp.where((top_k == 0) | (keys >= kth), weights, 0)
    with jax.named_scope("top_p"):
        last = _threshold(keys, weights, top_p * _sum(weights)[..., None])
        # a mass below the smallest float is reached by no token at all: the top one stays
        last = jnp.minimum(last, keys.max(-1, keepdims=True))
        weights = jnp.where((top_p >= 1) | (keys >= last), weights, 0)
    return jnp.where(weights >= options.real("min_p"), weights, 0)


def filtered_weights_reference(logits: jax.Array, options: Options) -> jax.Array:
    """`filtered_weights` with a sorted vocabulary."""
    weights = _weights(logits, options)
    top_k, top_p = options.integers[..., 0, None], options.real("top_p")
    descending = -jnp.sort(-logits, axis=-1)
    kth = jnp.take_along_axis(descending, jnp.where(top_k == 0, logits.shape[-1], top_k) - 1, axis=-1)
    weights = jnp.where(logits >= kth, weights, 0)
    mass = jnp.cumsum(-jnp.sort(-weights, axis=-1), axis=-1)
    enough = (mass >= top_p * mass[..., -1:]).argmax(-1, keepdims=True)
    is_kept = (top_p >= 1) | (logits >= jnp.take_along_axis(descending, enough, axis=-1))
    weights = jnp.where(is_kept, weights, 0)
    return jnp.where(weights >= options.real("min_p"), weights, 0)


def greedy(logits: jax.Array) -> jax.Array:
    """The largest logit's id, ties to the lowest id, NaN never.   logits: [B, V] -> [B] i32"""
    return jnp.argmax(jnp.where(jnp.isnan(logits), -jnp.inf, logits), axis=-1).astype(jnp.int32)


def log_probabilities(logits: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Raw log-softmax of `token`, and the ids and values of the 16 largest.

    Where V < 16 these are padded with -1 and −inf.
    logits: [B, V], token: [B] i32 -> [B] f32, [B, 16] i32, [B, 16] f32
    """
    logits = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    own = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    values, ids = _largest(logits)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, MAX_LOGPROBS - ids.shape[-1])]
    return own, jnp.pad(ids, padding, constant_values=-1), jnp.pad(values, padding, constant_values=-jnp.inf)


def _largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The 16 largest of each row, or all, and where they are: descending, ties in order.

    XLA has a kernel that a graph can hold for k ≤ 16 of at least 1,024; anything else becomes a sort. It
    gives a row to one block, which takes 0.3 ms for 150,000 entries on an H200: long rows go through it in
    segments.
    """
    size = x.shape[-1]
    if size < SEGMENT * SEGMENT // MAX_LOGPROBS:
        return jax.lax.top_k(x, min(MAX_LOGPROBS, size))
    segments = jnp.pad(x, ((0, 0), (0, -size % SEGMENT)), constant_values=-jnp.inf).reshape(-1, SEGMENT)
    values, ids = jax.lax.top_k(segments, MAX_LOGPROBS)
    first = jnp.arange(len(segments))[:, None] * SEGMENT % (-(-size // SEGMENT) * SEGMENT)
    values, ids = (part.reshape(x.shape[0], -1) for part in (values, ids + first))
    values, chosen = jax.lax.top_k(values, MAX_LOGPROBS)
    return values, jnp.take_along_axis(ids, chosen, axis=-1)


def is_stop(options: Options, token: jax.Array) -> jax.Array:
    """Whether `token` ends its row; -1 (no token) never does.   token: [B] i32 -> [B] bool"""
    return ((options.stops == token[..., None]) & (options.stops >= 0)).any(-1)


def _weights(logits, options):
    """exp((x − max) / temperature): [B, V] f32, 1 at the top; −inf gives 0, also in a row of nothing else."""
    temperature = jnp.maximum(options.real("temperature"), FLOAT32.tiny)
    top = jnp.maximum(logits.max(-1, keepdims=True), FLOAT32.min)
    return jnp.exp((logits - top) / temperature)


def _ordered_keys(logits):
    """Integers in the order of the floats: their bits, negatives' magnitude flipped; −0 is 0.   [B, V] i32"""
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _threshold(keys, weights, target):
    """The largest t for which the weights of {keys ≥ t} sum to at least `target`, else the lowest t.

    Each pass settles the next `RADIX_BITS` bits of t: one reduction sums the weights for every value of them.
    The sums fall as t grows (in f32 too: they share one tree), so the number of those that reach the target
    is the value itself. The search builds t as an unsigned number; flipping the sign bit makes it a key.
    keys: [B, V] i32, weights: [B, V] f32 ≥ 0, target: [B, 1] f32 -> [B, 1] i32
    """
    shifts = range(32 - RADIX_BITS, -1, -RADIX_BITS)

    def settle(threshold, shift):
        digits = np.arange(1, 2**RADIX_BITS, dtype=np.int32) << shift
        candidates = (threshold | digits) ^ LOWEST_KEY  # [B, digits]
        sums = _sum(jnp.where(keys[..., None, :] >= candidates[..., None], weights[..., None, :], 0))
        digit = (sums >= target).sum(-1, keepdims=True, dtype=jnp.int32)
        return threshold | digit << shift

    def unrolled(threshold):
        return functools.reduce(settle, map(np.int32, shifts), threshold)

    def rolled(threshold):  # XLA:CPU compiles one pass in a tenth of the time of eight
        return jax.lax.fori_loop(
            0, len(shifts), lambda i, threshold: settle(threshold, shifts.start - i * RADIX_BITS), threshold
        )

    start = jnp.zeros(target.shape, jnp.int32)
    return jax.lax.platform_dependent(start, cpu=rolled, default=unrolled) ^ LOWEST_KEY


def _sum(values):
    """Sum over the last axis in two stages, f32.   [..., V] -> [...]"""
    size, block = values.shape[-1], min(values.shape[-1], SUM_BLOCK)
    blocks = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -size % block)])
    return blocks.reshape(*values.shape[:-1], -1, block).sum(-1).sum(-1)


def _choose(logits, weights, options, position):
    """Draw id i with probability weights[i] / Σ weights, or the argmax of `logits` in greedy rows.   [B] i32

    argmax w / e, e ~ Exp(1), is Gumbel-max without its second logarithm: e = −log(1 − u), u in steps of 2⁻³².
    The winner has a small e, where this form keeps every step. JAX's default Gumbel noise has steps of 2⁻²³
    there: among 262k tokens its two largest values tie once in 32 draws, here once in V⁻¹ · 2³² = 16,000.
    Only tokens less likely than about 2⁻³² are never drawn.
    """

    def noise(seed, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        bits = jax.random.bits(jax.random.fold_in(key, position), logits.shape[-1:], jnp.uint32)
        uniform = bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33
        return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))  # at 1 a row's only token would score 0

    with jax.named_scope("draw"):
        seed = jax.lax.bitcast_convert_type(options.integers[..., 3:1:-1], jnp.uint32)  # high half first
        score = weights / jax.vmap(noise)(seed, position)
        return jnp.argmax(jnp.where(options.is_greedy[..., None], logits, score), axis=-1).astype(jnp.int32)
