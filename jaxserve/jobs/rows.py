"""A line of a job's input → what to ask the engine, and its completion → a line of the output.

Native rows are `{"id", "prompt" | "prompt_tokens" | "messages", …fields of SamplingParams}`; rows with a
`custom_id` are those of OpenAI's batch files (`openai.py`).
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxserve.jobs import openai
from jaxserve.params import SamplingParams
from jaxserve.request import Request
from jaxserve.results import Completion

if TYPE_CHECKING:
    from jaxserve.engine import Engine

PROMPTS = {"prompt": str, "prompt_tokens": list, "messages": list}
FIELDS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
NAMES = ("id", "tools", *PROMPTS, *FIELDS)
DIGEST_BYTES = 8
SEPARATORS = {ord(c): f"\\u{ord(c):04x}" for c in "\u0085\u2028\u2029"}
"""Characters at which some readers split lines, and how JSON spells them; it escapes the others by itself."""


@dataclasses.dataclass(frozen=True)
class Question:
    """What a row asks."""

    prompt: str | list[int] | list[dict]  # text, ids, or messages
    params: SamplingParams
    tools: list | None = None

    def request(self, engine: "Engine") -> Request:
        """The request to submit. Raises what the engine or the chat template refuse it with."""
        if isinstance(self.prompt, list) and isinstance(self.prompt[0], dict):
            chat = engine.tokenizer.encode_chat(self.prompt, tools=self.tools)
            return engine._request(chat.ids, self.params, chat.borders)
        return engine._request(self.prompt, self.params)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a job."""

    id: str | int
    digest: str  # of all that it asks
    question: Question | Exception  # or why it cannot be asked
    given: dict  # as it came
    form: Callable[["Row", Completion, "Engine"], dict]  # its answer's, less the digest

    def request(self, engine: "Engine") -> Request:
        """The request to submit."""
        if isinstance(self.question, Exception):
            raise self.question
        return self.question.request(engine)

    def repeated(self, times: int, why: Exception) -> "Row":
        """The same row with an error in place of its question: its id has come `times` times."""
        return dataclasses.replace(self, question=why, digest=digest_of([self.digest, times]))

    def answer(self, completion: Completion, stamp: str, engine: "Engine") -> bytes:
        """Its line of the output."""
        return as_line(self.form(self, completion, engine) | {"digest": stamp})


def read_row(line: bytes, number: int, defaults: SamplingParams) -> Row:
    """The row on line `number`, which counts from 1. A line that makes no sense is a row with an error.

    defaults: what holds for fields that a row does not set.
    """
    base = {name: value for name, value in vars(defaults).items() if value != FIELDS[name]}
    try:
        given = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        digest = digest_of([given, base])
    except (ValueError, RecursionError) as error:
        why = ValueError(f"line {number} is not JSON: {error}")
        return Row(number, digest_of([line.hex(), base]), why, {}, native_form)
    if not isinstance(given, dict):
        why = TypeError(f"line {number} is a JSON {type(given).__name__}: expected an object")
        return Row(number, digest, why, {}, native_form)
    is_openai = "custom_id" in given or "body" in given
    parse, form = (openai.question, openai.form) if is_openai else (native_question, native_form)
    own_id = given.get("custom_id" if is_openai else "id")
    is_id = type(own_id) in (str, int)
    try:
        if own_id is not None and not is_id:
            raise TypeError(f"the id is {own_id!r}: expected a string or an integer")
        prompt, options, tools = parse(given)
        question = Question(prompt, dataclasses.replace(defaults, **options), tools)
    except (ValueError, TypeError) as error:
        question = error
    return Row(own_id if is_id else number, digest, question, given, form)


def native_question(given: dict) -> tuple[str | list, dict, list | None]:
    """(prompt, options, tools) of a native row."""
    given = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(given.keys() - set(NAMES))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}: expected {', '.join(NAMES)}")
    named = [name for name in PROMPTS if name in given]
    if len(named) != 1:
        raise ValueError(
            f"the row has {' and '.join(named) or 'no prompt'}: expected one of {', '.join(PROMPTS)}"
        )
    check_prompt(named[0], given[named[0]])
    return given[named[0]], {name: given[name] for name in FIELDS if name in given}, given.get("tools")


def check_prompt(name: str, prompt: object) -> None:
    """Refuses a prompt that is empty or not what its name says."""
    if not isinstance(prompt, PROMPTS[name]):
        raise TypeError(f"{name} is a {type(prompt).__name__}: expected a {PROMPTS[name].__name__}")
    if not prompt:
        raise ValueError(f"{name} is empty")
    items = {"messages": dict, "prompt_tokens": int}.get(name)
    for index, item in enumerate(prompt if items else ()):
        if type(item) is not items:
            raise TypeError(f"{name}[{index}] is {item!r}: expected {items.__name__}")


def native_form(row: Row, completion: Completion, engine: "Engine | None" = None) -> dict:
    """The row of the output that answers a native row, less its digest."""
    names = ("text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "error")
    out = {"id": row.id} | {name: getattr(completion, name) for name in names}
    if completion.logprobs is not None:
        out["logprobs"] = [dataclasses.asdict(entry) for entry in completion.logprobs]
    return out


def digest_of(value: object) -> str:
    """A short digest of plain data, the same whatever the order of keys."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=DIGEST_BYTES).hexdigest()


def as_line(value: dict) -> bytes:
    """One line of JSON with its end. Text stays readable; a lone surrogate is escaped, as JSON may."""
    text = json.dumps(value, ensure_ascii=False).translate(SEPARATORS)
    return text.encode("utf-8", "backslashreplace") + b"\n"
