"""Which part of the model an operation belongs to, from the names that `jax.named_scope` leaves behind."""

import re
from collections import Counter
from collections.abc import Iterable

LAYER_KINDS = ("embed", "attention", "delta", "mlp", "moe", "norm", "lm_head", "sampling")

_WRAPPED = re.compile(r"^\w+\((.*)\)$")  # vmap(attention) -> attention
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")


def kind_of(op_name: str) -> str | None:
    """The innermost known scope of a path like "jit(decode)/mlp/norm/mul:": here "norm". None without one."""
    for part in reversed(op_name.replace(":", "/").split("/")):
        while match := _WRAPPED.match(part):
            part = match[1]
        if part in LAYER_KINDS:
            return part
    return None


def kinds_from_hlo(texts: Iterable[str]) -> dict[str, str]:
    """{kernel name: layer kind} from compiled HLO texts (`compiled.as_text()`).

    Kernels are named after their HLO instruction, also in a graph, where no scope survives. A fusion whose
    own metadata names no scope takes the most common one of what it fused. A name that means two kinds in
    two programs is left out.
    """
    kinds: dict[str, set[str]] = {}
    for text in texts:
        for name, kind in _instructions(text):
            kinds.setdefault(kernel_name(name), set()).add(kind)
    return {name: next(iter(found)) for name, found in kinds.items() if len(found) == 1}


def kernel_name(instruction: str) -> str:
    """XLA writes the kernel of "loop_fusion.3" as "loop_fusion_3"."""
    return instruction.replace(".", "_").replace("-", "_")


def _instructions(text: str) -> list[tuple[str, str]]:
    inside: dict[str, Counter] = {}  # computation -> kinds of its instructions
    found, callers = [], []
    computation = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            op_name, calls = _OP_NAME.search(line), _CALLS.search(line)
            if kind := kind_of(op_name[1]) if op_name else None:
                inside.setdefault(computation, Counter())[kind] += 1
                found.append((match[1], kind))
            elif calls:
                callers.append((match[1], calls[1]))
    found += [(name, inside[called].most_common(1)[0][0]) for name, called in callers if called in inside]
    return found
