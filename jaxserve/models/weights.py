"""GGUF tensors → the pytree of weights, under one set of names for every architecture."""

import os
from collections.abc import Callable, Sequence

import chex
import gguf
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import quant
from jaxserve.config import ModelConfig
from jaxserve.errors import UnsupportedModel
from jaxserve.gguf.hyperparameters import read_config, rope_frequencies
from jaxserve.gguf.reader import GGUFFile, Tensor, open_gguf
from jaxserve.gguf.tensors import check_tensors
from jaxserve.models.layers import Layers, stack
from jaxserve.state import nbytes

Matrix = quant.Matrix
Progress = Callable[[str, int, int], None]

# A projection whose outputs stand side by side: its parts of one ggml type become one matrix, read by one
# kernel.
PROJECTIONS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_out": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
    "delta_in": ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"),
    "delta_out": ("ssm_out",),
    "experts_gate_up": ("ffn_gate_exps", "ffn_up_exps"),
    "experts_down": ("ffn_down_exps",),
    "shared_gate_up": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared_down": ("ffn_down_shexp",),
}
FUSED = {
    "qkv": "attn_qkv",
    "experts_gate_up": "ffn_gate_up_exps",
}  # one tensor for all parts, where a file has it
BIASED = {"qkv": "qkv_bias", "attn_out": "attn_out_bias", "gate_up": "gate_up_bias", "down": "down_bias"}

# Vectors are stacked over the layers that have them: few leaves, sliced for free inside the step.
VECTORS = {
    "attn_norm": "attn_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "ffn_post_norm": "post_ffw_norm.weight",
    "conv": "ssm_conv1d.weight",
    "decay": "ssm_a",
    "decay_bias": "ssm_dt.bias",
    "delta_norm": "ssm_norm.weight",
    "shared_gate": "ffn_gate_inp_shexp.weight",
}
HYBRID = {"qwen35", "qwen35moe", "qwen3next"}
HYBRID_VECTORS = VECTORS | {
    "ffn_norm": "post_attention_norm.weight",
    "attn_post_norm": None,
}  # same name, another role
PER_KIND = {
    "attention": ("q_norm", "k_norm", "qkv_bias", "attn_out_bias"),
    "delta": ("conv", "decay", "decay_bias", "delta_norm"),
}
# A row of a stack is an operand without a copy where it begins at a multiple of 256 bytes; most rows do.
PADDED, ALIGNED_FLOATS = ("decay", "decay_bias"), 64


@chex.dataclass(frozen=True)
class Weights:
    """Arguments of every step, put on the device once."""

    embed: Matrix  # [V, E]
    output: Matrix | None  # [V, E]   None: tied to `embed`
    output_norm: jax.Array  # [E]
    output_bias: jax.Array | None  # [V]
    rope: dict[str, jax.Array]  # table name → [R/2] angle per position
    layers: Layers  # projections (and the router) of each layer
    vectors: dict[str, dict[str, jax.Array]]  # "all" | layer kind → name → [layers of it, …]

    @property
    def head(self) -> Matrix:
        """The output matrix [V, E]."""
        return self.embed if self.output is None else self.output


def layer_weights(weights: Weights, config: ModelConfig, index: int) -> dict:
    """Everything layer `index` multiplies with, by name."""
    layer = config.layers[index]
    vectors = {name: stacked[index] for name, stacked in weights.vectors["all"].items()}
    for name, stacked in weights.vectors[layer.kind].items():
        vectors[name] = stacked[layer.rank, : config.delta.value_heads if name in PADDED else None]
    return {**weights.layers[index], **vectors}


def step_nbytes(weights: Weights, config: ModelConfig) -> int:
    """Bytes that a decode step of one row reads: of the experts those that it chooses."""
    stacks = weights.layers.stacks.items()
    experts = nbytes([matrix for key, matrix in stacks if key.startswith("experts_")])
    idle = experts - experts * config.experts.used // config.experts.count if experts else 0
    return nbytes(weights) - idle


def load_weights(
    path: str | os.PathLike | GGUFFile, *, weights: str = "auto", progress: Progress | None = None
) -> tuple[Weights, ModelConfig]:
    """Read a GGUF file onto the default device.

    weights: "packed" keeps ggml's packing, "float32" makes a float copy, "auto" is packed on accelerators and
    on CPU float32 where the copy fits in a quarter of the free memory. progress(stage, done bytes, all bytes)
    is called as tensors arrive.
    """
    file = path if isinstance(path, GGUFFile) else open_gguf(path)
    config = read_config(file)
    check_tensors(file, config)
    return _Loader(file, config, resolve_mode(weights, file), progress).load(), config


def resolve_mode(weights: str, file: GGUFFile) -> str:
    """ "packed" or "float32", deciding "auto" by the device and its free memory."""
    if weights not in ("auto", "packed", "float32"):
        raise ValueError(f"weights={weights!r}: expected 'auto', 'packed' or 'float32'")
    if weights != "auto":
        return weights
    if jax.default_backend() != "cpu":
        return "packed"
    elements = sum(int(np.prod(tensor.shape)) for tensor in file.tensors.values())
    return "float32" if 4 * elements <= free_host_memory() / 4 else "packed"


def free_host_memory() -> int:
    """Bytes the host could still hand out, reclaimable caches included where the system tells."""
    try:
        with open("/proc/meminfo") as table:
            return next(int(line.split()[1]) * 1024 for line in table if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Loader:
    """One pass over the tensors of a file; progress counts the bytes seen."""

    def __init__(self, file: GGUFFile, config: ModelConfig, mode: str, progress: Progress | None):
        self.file, self.config, self.mode, self.progress = file, config, mode, progress
        self.done, self.total = 0, sum(tensor.raw.nbytes for tensor in file.tensors.values())
        self.names = HYBRID_VECTORS if config.architecture in HYBRID else VECTORS

    def load(self) -> Weights:
        layers = stack([self.projections(i) for i in range(len(self.config.layers))])
        tied = "output.weight" not in self.file.tensors
        return Weights(
            embed=self.matrix(self.file.tensors["token_embd.weight"]),
            output=None if tied else self.matrix(self.file.tensors["output.weight"]),
            output_norm=jnp.asarray(self.vector("output_norm.weight")),
            output_bias=self.optional("output.bias"),
            rope={
                name: jnp.asarray(table) for name, table in rope_frequencies(self.file, self.config).items()
            },
            layers=layers,
            vectors=self.vectors(),
        )

    # -- matrices

    def projections(self, index: int) -> dict:
        found = {}
        for name, parts in PROJECTIONS.items():
            tensors = self.parts(index, name, parts)
            if tensors:
                found[name] = _merge([self.matrix(tensor) for tensor in tensors])
        router = f"blk.{index}.ffn_gate_inp.weight"
        if router in self.file.tensors:
            found["router"] = (jnp.asarray(self.vector(router)),)
        return found

    def parts(self, index: int, name: str, parts: Sequence[str]) -> list[Tensor]:
        """The file's tensors of one projection, in output order; [] if the layer has none."""
        get = lambda tensor: self.file.tensors.get(f"blk.{index}.{tensor}.weight")  # noqa: E731
        delta = self.config.layers[index].kind == "delta"
        if name == "delta_in":
            return _delta_parts(get, self.config) if delta else []
        if name == "qkv" and delta:  # a delta layer's attn_qkv is another projection
            return []
        if name in FUSED and get(FUSED[name]) is not None:
            return [get(FUSED[name])]
        return [tensor for tensor in map(get, parts) if tensor is not None]

    def matrix(self, tensor: Tensor) -> Matrix:
        loaded = quant.load_matrix(tensor.raw, tensor.type, name=tensor.name, mode=self.mode)
        self.advance(tensor)
        return loaded

    # -- vectors

    def vectors(self) -> dict:
        grouped = {"all": {}, "attention": {}, "delta": {}}
        indices = {
            kind: [i for i, layer in enumerate(self.config.layers) if kind in ("all", layer.kind)]
            for kind in grouped
        }
        kind_of = {name: kind for kind, names in PER_KIND.items() for name in names}
        for name in [*self.names, *BIASED.values()]:
            kind = kind_of.get(name, "all")
            rows = [self.layer_vector(i, name) for i in indices[kind]]
            present = [row for row in rows if row is not None]
            if len(present) not in (0, len(rows)):
                raise UnsupportedModel(
                    f"{self.file.path}: {name} is present in {len(present)} of {len(rows)} {kind} layers"
                )
            if present:
                stacked = np.stack(present)
                if name in PADDED:
                    stacked = np.pad(stacked, ((0, 0), (0, -stacked.shape[1] % ALIGNED_FLOATS)))
                grouped[kind][name] = jnp.asarray(stacked)
        return grouped

    def layer_vector(self, index: int, name: str) -> np.ndarray | None:
        if name in self.names:
            tensor = self.names[name] and f"blk.{index}.{self.names[name]}"
            found = self.vector(tensor) if tensor in self.file.tensors else None
            return found.reshape(-1) if name == "shared_gate" and found is not None else found
        projection = next(p for p, bias in BIASED.items() if bias == name)
        fused = f"blk.{index}.{FUSED.get(projection)}.bias"
        if fused in self.file.tensors:
            return self.vector(fused)
        parts = [f"blk.{index}.{part}" for part in PROJECTIONS[projection]]
        if not any(f"{part}.bias" in self.file.tensors for part in parts):
            return None
        return np.concatenate([self.bias(part) for part in parts])

    def bias(self, name: str) -> np.ndarray:
        """The bias of one part of a projection; zeros where only other parts have one."""
        if f"{name}.bias" in self.file.tensors:
            return self.vector(f"{name}.bias")
        return np.zeros(self.file.tensors[f"{name}.weight"].shape[0], np.float32)

    def vector(self, name: str) -> np.ndarray:
        tensor = self.file.tensors[name]
        self.advance(tensor)
        return (
            gguf.quants.dequantize(np.array(tensor.raw), tensor.type).reshape(tensor.shape).astype(np.float32)
        )

    def optional(self, name: str) -> jax.Array | None:
        return jnp.asarray(self.vector(name)) if name in self.file.tensors else None

    def advance(self, tensor: Tensor) -> None:
        self.done += tensor.raw.nbytes
        if self.progress:
            self.progress("weights", self.done, self.total)


def _merge(matrices: list[Matrix]) -> tuple[Matrix, ...]:
    """Neighbours of one ggml type and form become one matrix."""
    kind = lambda matrix: (quant.type_name(matrix), type(matrix))  # noqa: E731
    merged = [[matrices[0]]]
    for matrix in matrices[1:]:
        same = kind(matrix) == kind(merged[-1][-1])
        merged[-1].append(matrix) if same else merged.append([matrix])
    return tuple(quant.concatenate_rows(group) if len(group) > 1 else group[0] for group in merged)


def _delta_parts(get: Callable[[str], Tensor | None], config: ModelConfig) -> list[Tensor]:
    """qkv, z, beta, alpha of a delta layer; qwen3next's fused tensors are regrouped row by row.

    `ssm_ba` holds for every key head its b rows, then its a rows; the legacy `ssm_in` its q, k, v, z rows.
    """
    delta = config.delta
    ratio = delta.value_heads // delta.key_heads
    parts = {name: get(name) for name in PROJECTIONS["delta_in"]}
    if parts["ssm_beta"] is None:
        rows = np.arange(2 * delta.value_heads).reshape(delta.key_heads, 2, ratio)
        parts["ssm_beta"], parts["ssm_alpha"] = (_rows(get("ssm_ba"), rows[:, i].ravel()) for i in range(2))
    if parts["attn_qkv"] is None:
        sizes = np.cumsum([delta.key_dim, delta.key_dim, ratio * delta.value_dim])
        rows = np.arange(get("ssm_in").shape[0]).reshape(delta.key_heads, -1)
        q, k, v, z = (block.ravel() for block in np.split(rows, sizes, axis=1))
        parts["attn_qkv"], parts["attn_gate"] = (
            _rows(get("ssm_in"), np.concatenate([q, k, v])),
            _rows(get("ssm_in"), z),
        )
    return list(parts.values())


def _rows(tensor: Tensor, index: np.ndarray) -> Tensor:
    return Tensor(
        name=tensor.name, shape=(len(index), *tensor.shape[1:]), type=tensor.type, raw=tensor.raw[index]
    )
