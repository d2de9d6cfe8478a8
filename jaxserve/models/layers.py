"""The matrices of all layers in few arrays: each costs the host some microseconds a launch.

Equal tiled matrices of several layers lie in one stack. Inside the step a layer's share is a static slice,
which XLA turns into an offset of the kernel's operand: nothing is copied. (XLA's own products would copy it,
and before jax 0.11 kernels too: then matrices stay apart.)
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.quant import Matrix, Tiled, type_name

ALONE = -1  # instead of an index into a stack
SLICES_ARE_OFFSETS = jax.__version_info__ >= (0, 11)

Place = tuple[str, int]  # a stack, and the index into it
Parts = tuple[Matrix, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layers:
    """layers[i] → projection → its matrices."""

    stacks: dict[str, Matrix]  # [N, K], or [layers of it, N, K]
    places: tuple[tuple[tuple[str, tuple[Place, ...]], ...], ...] = dataclasses.field(
        metadata={"static": True}
    )

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Parts]:
        return {name: tuple(map(self._matrix, places)) for name, places in self.places[index]}

    def _matrix(self, place: Place) -> Matrix:
        key, index = place
        return self.stacks[key] if index == ALONE else jax.tree.map(lambda x: x[index], self.stacks[key])


def stack(layers: Sequence[dict[str, Parts]]) -> Layers:
    """Stacks what is alike. The dictionaries are emptied, so that only one group at a time is there twice."""
    groups: dict[str, list[Matrix]] = {}
    places = []
    for number, layer in enumerate(layers):
        here = []
        for name, parts in layer.items():
            keys = [_key(number, name, part, matrix) for part, matrix in enumerate(parts)]
            here.append((name, tuple((key, len(groups.get(key, ()))) for key in keys)))
            for key, matrix in zip(keys, parts, strict=True):
                groups.setdefault(key, []).append(matrix)
        places.append(here)
        layer.clear()
    single = {key for key, matrices in groups.items() if len(matrices) == 1}
    stacks = {key: _stacked(groups.pop(key)) for key in list(groups)}
    return Layers(
        stacks=stacks,
        places=tuple(
            tuple((name, tuple((k, ALONE if k in single else i) for k, i in found)) for name, found in here)
            for here in places
        ),
    )


def _key(layer: int, name: str, part: int, matrix: Matrix) -> str:
    if not (isinstance(matrix, Tiled) and SLICES_ARE_OFFSETS):
        return f"{name}.{part} of layer {layer}"
    return f"{name}.{part} {type_name(matrix)} {'x'.join(map(str, matrix.shape))}"


@jax.jit
def _stack(*leaves: jax.Array) -> jax.Array:
    return jnp.stack(leaves)


def _stacked(matrices: list[Matrix]) -> Matrix:
    return matrices[0] if len(matrices) == 1 else jax.tree.map(_stack, *matrices)
