"""A state whose rows are reached by slot, as the engine's runner offers them, and models of every kind."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import snapshot
from jaxserve.config import Delta, Layer, ModelConfig
from jaxserve.state import State, init_state

VOCABULARY = 50
KINDS = {
    "attention": ("attention", "attention"),
    "hybrid": ("delta", "attention", "delta"),
    "recurrent": ("delta", "delta"),
}
DELTA = Delta(conv_width=4, key_heads=1, value_heads=2, key_dim=4, value_dim=3, grouped=False)


def model(kind: str) -> ModelConfig:
    """The config of a model that nobody runs."""
    names = KINDS[kind]
    layers = tuple(Layer(kind=name, rank=names[:i].count(name)) for i, name in enumerate(names))
    sizes = dict(vocab_size=VOCABULARY, embed_size=8, context_length=4096, heads=2, kv_heads=2, head_dim=4)
    rest = dict(rope_dims=4, rope_interleaved=False, norm_eps=1e-6, attention_scale=0.5)
    delta = DELTA if "delta" in names else None
    return ModelConfig(architecture="test", layers=layers, delta=delta, **sizes, **rest)


def random_state(
    config: ModelConfig, *, slots: int, context: int, kv_dtype: str = "float16", seed: int = 0
) -> State:
    """A state full of noise, with the default options."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
        return jnp.asarray(rng.integers(0, VOCABULARY, leaf.shape), leaf.dtype)

    empty = init_state(config, slots=slots, context=context, kv_dtype=kv_dtype)
    return jax.tree.map(fill, empty).replace(options=empty.options)


def on_host(tree):
    """True copies as NumPy arrays."""
    return jax.tree.map(np.array, tree)


def assert_same(a, b) -> None:
    """Equal trees, dtypes, shapes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def row(state: State, slot: int, length: int) -> dict:
    """What describes the first `length` tokens of a row, its length aside."""
    memory = state.memory
    names = [name for name in ("keys", "values", "delta", "conv") if memory[name] is not None]
    cut = {name: np.asarray(memory[name])[:, slot] for name in names}
    cut |= {
        name: np.ascontiguousarray(cut[name][:, :, :length]) for name in names if name in ("keys", "values")
    }
    return cut | {"history": np.array(state.history)[slot, :length], "logits": np.array(state.logits)[slot]}


class StateRows:
    """`jaxserve.host_tier.Rows` over a state of its own; counts what is read and written."""

    def __init__(self, state: State):
        self.state, self.calls = state, []

    def read_block(self, slot, start):
        return self._read(snapshot.read_block, slot, start)

    def read_end(self, slot):
        return self._read(snapshot.read_end, slot)

    def write_blocks(self, slot, start, count, blocks):
        self.calls += ["write_block"] * len(blocks)
        for done, block in zip(range(0, count + 1, snapshot.BLOCK_TOKENS), blocks, strict=False):
            place = (np.int32(x) for x in (slot, start + done, count - done))
            self.state = snapshot.write_blocks(self.state, *place, block)

    def write_end(self, slot, tokens, end):
        padded = np.zeros(self.state.history.shape[1], np.int32)
        padded[: len(tokens)] = tokens
        self.calls.append("write_end")
        self.state = snapshot.write_end(self.state, np.int32(slot), padded, end)

    def _read(self, function, *place):
        self.calls.append(function.__name__)
        return function(self.state, *map(np.int32, place))
