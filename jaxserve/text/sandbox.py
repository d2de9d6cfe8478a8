"""Jinja for templates nobody vouches for: sandboxed, and bounded in what one rendering may do.

Bounded are the turns of loops and the calls (together), the length of what an operator joins or repeats, and
the whole text. What a single filter or string method makes is bounded by memory alone.
"""

import functools
import json
import types
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000  # turns of loops + calls
MAX_CHARACTERS = 2**24
MAX_POWER_BITS = 4096
CACHED_TEMPLATES = 16


class _CountingGenerator(CodeGenerator):
    """Compiles loops and `~` to pass through the environment, as the sandbox does for calls and `+`."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # jinja's name
        node.iter = nodes.Call(
            nodes.EnvironmentAttribute("counted"), [node.iter], [], None, None, lineno=node.lineno
        )
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # jinja's name
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}` marks text for training; rendering has no use for it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one rendering, set up as transformers sets up its own."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _CountingGenerator

    def __init__(self):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateRuntimeError(f"takes more than {MAX_STEPS:,} turns of loops and calls")

    def counted(self, items: Iterable) -> Iterator:
        """The items of a loop."""
        for item in items:
            self.step()
            yield item

    def joined(self, parts: tuple) -> str:
        """What `~` makes."""
        return _bounded("".join(map(str, parts)))

    def call(__self, __context, __callable, *args, **kwargs):  # mangled: kwargs have the template's names
        __self.step()
        return super().call(__context, __callable, *args, **kwargs)

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _check_length(len(sequence) * count)
        if operator == "**" and all(isinstance(x, int) for x in (left, right)):
            if left.bit_length() * right > MAX_POWER_BITS:
                raise TemplateRuntimeError(f"makes a number of more than {MAX_POWER_BITS:,} bits")
        return _bounded(super().call_binop(context, operator, left, right))


def render(source: str, variables: dict[str, Any]) -> str:
    """The text of a template. Raises `jinja2.TemplateError`, and whatever its expressions raise."""
    environment = BoundedEnvironment()
    template = environment.template_class.from_code(
        environment, _compile(source), environment.make_globals(None)
    )
    pieces, length = [], 0
    for piece in template.generate(**variables):
        length += len(piece)
        _check_length(length)
        pieces.append(piece)
    return "".join(pieces)


@functools.lru_cache(CACHED_TEMPLATES)
def _compile(source: str) -> types.CodeType:
    return BoundedEnvironment().compile(source)


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    return value


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise TemplateRuntimeError(f"makes a text of more than {MAX_CHARACTERS:,} characters")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Unlike jinja's own: nothing is escaped for HTML, and keys keep their order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
