"""Chat templates: messages to the text a model knows, and which special tokens in it the template wrote."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.text.special import SpecialTokens

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PRIVATE_USE = range(0x10FFFD, 0xFFFFF, -1)  # plane 16: no text has a reason to hold these

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A chat template refused the messages, with words of its own, or could not be rendered."""


def render_chat_template(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """The text a Jinja chat template makes of `messages`, as transformers renders it.

    Keys of a message whose value is None are left out. `variables` reach the template by name
    (`enable_thinking`, `date_string`, `documents` …). Templates are untrusted: `jaxserve.text.sandbox` says
    what bounds them.
    """
    from jinja2 import TemplateError, TemplateSyntaxError  # only when a template is rendered

    from jaxserve.text.sandbox import render

    defaults = {"documents": None, "bos_token": bos_token, "eos_token": eos_token}
    cleaned = [
        {key: value for key, value in message.items() if value is not None} for message in _checked(messages)
    ]
    given = {"messages": cleaned, "tools": tools, "add_generation_prompt": add_generation_prompt}
    try:
        return render(template, defaults | variables | given)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template is not valid Jinja, line {error.lineno}: {error.message}"
        ) from error
    except TemplateError as error:
        raise ChatTemplateError(f"the chat template refused the messages: {error.message}") from error
    except Exception as error:  # an expression met a value the template did not expect
        raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error


def template_fragments(
    render: Callable[..., str],
    special: SpecialTokens,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    variables: dict[str, Any],
) -> list[str | int]:
    """What `render(messages, tools, **variables)` gives: ordinary text, and the template's special tokens.

    The caller's strings are rendered with the first character of every control token they spell exchanged
    for a private one, put back once the special tokens of the text have been found. That keeps every length,
    and everything a template may look for (`</think>`, say) but control tokens. A template may also make a
    control token of pieces of a caller's string (`content | replace(…)`). So a second rendering has every
    such character exchanged, wherever it stands; it is taken if its text is the same, for some templates
    look at these characters.
    """
    marks = _Marks(special, messages, tools, variables)
    text = exact = marks.render(render, marks.tokens)
    if marks.exchanges_more:
        try:
            wary = marks.render(render, marks.signs)
        except ChatTemplateError:
            wary = None
        if wary is not None and marks.restored(wary) == marks.restored(exact):
            text = wary
    fragments: list[str | int] = []
    for fragment in special.split(text, parse_special=True):
        if isinstance(fragment, int):
            fragments.append(fragment)
        else:
            fragments += special.split(marks.restored(fragment), parse_special=False)
    return fragments


class _Marks:
    """Private characters that stand for the first characters of control tokens in a caller's strings."""

    def __init__(self, special: SpecialTokens, *values: Any):
        self._values = values  # messages, tools, variables
        text = "\n".join(_strings(values))
        self._spelled = [needle for needle, index in special.occurring(text) if index in special.control_ids]
        signs = [sign for sign in special.first_signs if sign in text]
        first = dict.fromkeys([*signs, *(needle[0] for needle in self._spelled)])
        free = (chr(point) for point in PRIVATE_USE if chr(point) not in text)
        self._marks = dict(zip(first, free, strict=False))
        self._signs = str.maketrans({sign: self._marks[sign] for sign in signs})
        self._originals = str.maketrans({mark: character for character, mark in self._marks.items()})
        self.exchanges_more = bool(signs)

    def tokens(self, text: str) -> str:
        """Marks the control tokens that `text` spells."""
        for needle in self._spelled:
            while needle in text:  # again, for one that overlaps itself
                text = text.replace(needle, self._marks[needle[0]] + needle[1:])
        return text

    def signs(self, text: str) -> str:
        """Marks those, and whatever could be the beginning of one."""
        return self.tokens(text).translate(self._signs)

    def restored(self, text: str) -> str:
        return text.translate(self._originals)

    def render(self, render: Callable[..., str], mark: Callable[[str], str]) -> str:
        messages, tools, variables = (_map_strings(value, mark) for value in self._values)
        return render(messages, tools, **variables)


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """`value` with `function` applied to every string inside."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, function): _map_strings(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, function) for item in value]
    return value


def _strings(value: Any) -> list[str]:
    found: list[str] = []
    _map_strings(value, lambda text: found.append(text) or text)
    return found


def _checked(messages: Sequence[Message]) -> Sequence[Message]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            f"messages is a {type(messages).__name__}, expected a list of dicts with role and content"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"messages[{index}]={message!r}: expected a dict with a role")
    return messages
