"""The functional layer on two tiny models: each step is compiled once, for all tests that call it."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

import jaxserve
from jaxserve import SamplingParams, step
from jaxserve.state import RUNNING, State, abstract_state
from tests.engines import tiny_weights

SLOTS, CONTEXT, CHUNK, LANES = 3, 96, 32, 3
MODELS = ("attention", "hybrid")


@functools.cache
def model(kind: str) -> tuple[jaxserve.Weights, jaxserve.ModelConfig]:
    """A two-layer llama, or a gated-delta and an attention layer of qwen35 (all eight take minutes)."""
    if kind == "attention":
        return tiny_weights("llama-f32")
    weights, config = tiny_weights("qwen35-bf16")
    return shallow(weights, config, (0, 3))


def shallow(
    weights: jaxserve.Weights, config: jaxserve.ModelConfig, indices: Sequence[int]
) -> tuple[jaxserve.Weights, jaxserve.ModelConfig]:
    """The model with only the layers `indices`, whose ranks must be 0, 1, … in each kind."""
    layers = tuple(weights.layers[index] for index in indices)
    shared = {name: stack[np.array(indices)] for name, stack in weights.vectors["all"].items()}
    return (
        weights.replace(layers=layers, vectors=weights.vectors | {"all": shared}),
        dataclasses.replace(config, layers=tuple(config.layers[index] for index in indices)),
    )


class Programs(dict):
    """Name → compiled step, with shorthands that call them. Every call donates the state."""

    def __init__(self, kind: str):
        self.weights, self.config = model(kind)
        self.state = abstract_state(self.config, slots=SLOTS, context=CONTEXT, kv_dtype="float32")
        i32, ids = jax.ShapeDtypeStruct((), np.int32), lambda n: jax.ShapeDtypeStruct((n,), np.int32)
        options = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.state.options)
        start = self.weights, self.state
        lower_decode = functools.partial(step.decode.lower, *start, ids(LANES), config=self.config)
        lowered = {
            "prefill": step.prefill.lower(*start, ids(CHUNK), *[i32] * 3, config=self.config, final=True),
            "decode": lower_decode(),
            "decode sampled": lower_decode(sampled=True),
            "admit": step.admit.lower(self.state, i32, options, i32),
            "halt": step.halt.lower(self.state, i32, i32),
        }
        super().__init__({name: program.compile() for name, program in lowered.items()})

    def empty(self) -> State:
        return jaxserve.init_state(self.config, slots=SLOTS, context=CONTEXT, kv_dtype="float32")

    def admit(self, state: State, slot: int, limit: int = 1000, **options) -> State:
        row = jaxserve.options(SamplingParams(**options), seed=7, vocab_size=self.config.vocab_size)
        return self["admit"](state, np.int32(slot), row, np.int32(limit))

    def feed(self, state: State, slot: int, tokens: Sequence[int], start: int = 0) -> State:
        """Prefill chunk by chunk."""
        for begin in range(0, len(tokens), CHUNK):
            chunk = tokens[begin : begin + CHUNK]
            padded = np.zeros(CHUNK, np.int32)
            padded[: len(chunk)] = chunk
            place = np.int32(slot), np.int32(start + begin), np.int32(len(chunk))
            state = self["prefill"](self.weights, state, padded, *place)
        return state

    def decode(self, state: State, *rows: int, sampled: bool = False) -> State:
        lanes = np.array([*rows, *[SLOTS] * (LANES - len(rows))], np.int32)
        return self["decode sampled" if sampled else "decode"](self.weights, state, lanes)

    def halt(self, state: State, slot: int, length: int) -> State:
        return self["halt"](state, np.int32(slot), np.int32(length))

    def generate(self, state: State, slot: int, prompt: Sequence[int], count: int) -> tuple[State, list[int]]:
        """Admit, prefill and decode greedily."""
        state = self.feed(self.admit(state, slot), slot, prompt)
        tokens = [int(state.token[slot])]
        while len(tokens) < count:
            state = self.decode(state, slot)
            tokens.append(int(state.token[slot]))
        return state, tokens

    def busy(self) -> State:
        """All slots hold a prompt of their own and run."""
        state = self.empty()
        for slot, length in enumerate((5, 20, 40)):
            state = self.feed(self.admit(state, slot), slot, prompt(self.config, slot, length))
        state = self.decode(state, *range(SLOTS))
        assert np.array(state.status).tolist() == [RUNNING] * SLOTS
        return state


@functools.cache
def programs(kind: str) -> Programs:
    return Programs(kind)


def prompt(config: jaxserve.ModelConfig, seed: int, length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, config.vocab_size, length)]


def slot_of(state: State, slot: int, *, without: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Copies of everything one slot holds, by the path of its leaf."""
    rows = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if not any(part in name for part in without):
            rows[name] = np.array(leaf)[:, slot] if "memory" in name else np.array(leaf)[slot]
    return rows


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Bit for bit, NaN included."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), f"{name} differs"
