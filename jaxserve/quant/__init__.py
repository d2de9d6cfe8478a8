"""Weights in ggml's packing: loaded, decoded, multiplied."""

from jaxserve.quant.load import has_packed_form, is_supported, load_matrix
from jaxserve.quant.matrix import Matrix, concatenate_rows, dequantise, nbytes, take, take_rows, type_name
from jaxserve.quant.multiply import Norm, expert_matmul, grouped_matmul, matmul, matmuls
from jaxserve.quant.packed import Packed
from jaxserve.quant.tiled import Tiled

__all__ = [
    "Matrix",
    "Norm",
    "Packed",
    "Tiled",
    "concatenate_rows",
    "dequantise",
    "expert_matmul",
    "grouped_matmul",
    "has_packed_form",
    "is_supported",
    "load_matrix",
    "matmul",
    "matmuls",
    "nbytes",
    "take",
    "take_rows",
    "type_name",
]
