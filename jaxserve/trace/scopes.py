"""Which part of the model an operation belongs to, from the names that `jax.named_scope` leaves behind."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LAYER_KINDS = ("embed", "attention", "delta", "mlp", "moe", "norm", "lm_head", "sampling")

_WRAPPED = re.compile(r"^\w+\((.*)\)$")  # vmap(attention) -> attention
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_BODY = re.compile(r" while\(.*\bbody=%?([\w.\-]+)")
_CUSTOM_CALL = " custom-call("


class Call(NamedTuple):
    """A kernel that XLA did not generate: one written by hand, or a library's."""

    name: str  # as the kernel's own name begins, where it was given one
    kind: str | None


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Layer kinds of a program's kernels."""

    by_name: Mapping[str, str] = dataclasses.field(default_factory=dict)  # kernel name → layer kind
    calls: Sequence[Call] = ()  # in the order they run, those of a loop once

    def of_calls(self, names: Sequence[str]) -> list[str | None]:
        """Layer kinds of a dispatch's kernels that no instruction is named after, in the order they ran.

        By the name of the call; where calls of that name, or without one, have several kinds, by the kernel's
        place among them; else by a layer kind in its name ("decode_attention_12_2"), or None.
        """
        given = {call.name for call in self.calls if call.name}
        named = [max((name for name in given if _begins(each, name)), key=len, default="") for each in names]
        calls: dict[str, list[str | None]] = {name: [] for name in ("", *named)}
        for call in self.calls:
            calls[call.name if call.name in calls else ""].append(call.kind)
        kinds = {name: iter(_spread(calls[name], named.count(name))) for name in calls}
        return [next(kinds[name]) or _kind_in(each) for name, each in zip(named, names, strict=True)]


def kind_of(op_name: str) -> str | None:
    """The innermost known scope of a path like "jit(decode)/mlp/norm/mul:": here "norm". None without one."""
    for part in reversed(op_name.replace(":", "/").split("/")):
        while match := _WRAPPED.match(part):
            part = match[1]
        if part in LAYER_KINDS:
            return part
    return None


def kernel_name(instruction: str) -> str:
    """XLA writes the kernel of "loop_fusion.3" as "loop_fusion_3"."""
    return instruction.replace(".", "_").replace("-", "_")


def kinds_from_hlo(text: str) -> Kinds:
    """Layer kinds from a program's compiled HLO (`compiled.as_text()`).

    Kernels are named after their HLO instruction, also in a graph, where no scope survives. A fusion whose
    own metadata names no scope takes the most common one of what it fused. Kernels that XLA did not generate
    have names of their own: those of the entry computation and of a loop's body, which are in the order of
    execution, are listed as calls. XLA wraps some of them into a fusion that slices their operands.
    """
    in_order = set(_BODY.findall(text))
    inside: dict[str, Counter] = defaultdict(Counter)  # computation -> kinds of its instructions
    wrapped: dict[str, str] = {}  # computation -> path of the custom call in it
    found, callers, calls = [], [], []
    computation, is_listed = "", False
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
            is_listed = line.startswith("ENTRY") or computation in in_order
        elif match := _INSTRUCTION.match(line):
            scope, called = _OP_NAME.search(line), _CALLED.search(line)
            path = scope[1] if scope else ""
            kind = kind_of(path)
            is_call = _CUSTOM_CALL in line
            if is_call and not is_listed:
                wrapped[computation] = path
            if is_listed and (is_call or (called and called[1] in wrapped)):
                path = path if is_call else wrapped[called[1]]
                calls.append(Call(_call_name(path), kind_of(path)))
            elif kind:
                inside[computation][kind] += 1
                found.append((match[1], kind))
            elif called:
                callers.append((match[1], called[1]))
    found += [(name, inside[called].most_common(1)[0][0]) for name, called in callers if inside[called]]
    return Kinds({kernel_name(name): kind for name, kind in found}, calls)


def _call_name(path: str) -> str:
    """ "jit(decode)/mlp/decode_q4_k/mpmd_map" -> "decode_q4_k": the scope a kernel written by hand opens."""
    parts = path.split("/")
    return parts[-2] if len(parts) > 1 and kind_of(parts[-2]) is None and "(" not in parts[-2] else ""


def _spread(kinds: list[str | None], count: int) -> list[str | None]:
    """One kind for all kernels, or one for each, turn after turn of a loop; None for each where their number
    does not fit.
    """
    if len(set(kinds)) == 1:
        return kinds[:1] * count
    turns, rest = divmod(count, len(kinds) or 1)
    return kinds * turns if kinds and not rest else [None] * count


def _begins(kernel: str, name: str) -> bool:
    return bool(name) and (kernel == name or kernel.startswith(f"{name}_"))


def _kind_in(kernel: str) -> str | None:
    return next((kind for kind in LAYER_KINDS if kind in kernel.split("_")), None)
