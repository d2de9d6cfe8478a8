"""Weights in ggml's packing: loaded, decoded, multiplied."""

from jaxserve.quant.load import has_packed_form, is_supported, load_matrix
from jaxserve.quant.multiply import expert_matmul, grouped_matmul, matmul
from jaxserve.quant.packed import (
    Matrix,
    Packed,
    concatenate_rows,
    dequantise,
    nbytes,
    rows,
    split_rows,
    take,
    take_rows,
    type_name,
)

__all__ = [
    "Matrix",
    "Packed",
    "concatenate_rows",
    "dequantise",
    "expert_matmul",
    "grouped_matmul",
    "has_packed_form",
    "is_supported",
    "load_matrix",
    "matmul",
    "nbytes",
    "rows",
    "split_rows",
    "take",
    "take_rows",
    "type_name",
]
