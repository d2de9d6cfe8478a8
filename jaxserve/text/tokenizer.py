"""The tokenizer of a GGUF file: text to ids, ids to bytes, conversations to ids."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.gguf.reader import open_gguf
from jaxserve.text.bpe import ByteLevelBPE, piece_bytes
from jaxserve.text.chat import CHATML, ChatTemplateError, Message, render_chat_template, template_fragments
from jaxserve.text.special import SpecialTokens
from jaxserve.text.spm import SPACE, SentencePiece
from jaxserve.text.vocabulary import BYTE_LEVEL, Kind, Vocabulary, read_vocabulary

RECENT_BORDERS = 4  # of the last messages; the first message's (the system prompt's) is always looked for


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A conversation as ids. `borders`: ascending lengths of prefixes of `ids` that end with a message."""

    ids: list[int]
    borders: tuple[int, ...]


class Tokenizer:
    """Gives the ids llama.cpp gives, but never two beginning-of-sequence tokens."""

    def __init__(self, vocabulary: Vocabulary, templates: dict[str, str] | None = None):
        self._vocabulary = vocabulary
        self._templates = templates or {}  # by name; "" is the default one
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.add_bos = vocabulary.add_bos and vocabulary.bos_id is not None
        self.end_ids = vocabulary.end_ids

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a GGUF file, of one with a vocabulary alone too."""
        return cls.from_metadata(open_gguf(path, tensors=False).metadata)

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> "Tokenizer":
        """The tokenizer in GGUF metadata. No tokenizer, or an unknown kind of one, is `UnsupportedModel`."""
        default, named = "tokenizer.chat_template", "tokenizer.chat_template."
        templates = {key.removeprefix(named): text for key, text in metadata.items() if key.startswith(named)}
        if default in metadata:
            templates[""] = metadata[default]
        return cls(read_vocabulary(metadata), templates)

    @property
    def special_ids(self) -> frozenset[int]:
        """Control and unknown tokens: what `decode` leaves out."""
        return self._special.control_ids

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if the file has one."""
        return self._templates.get("")

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`.

        add_special: begin with BOS (end with EOS) if the model asks for it and the text does not do so yet.
        parse_special: control tokens are recognised where the text spells them; else they are ordinary text.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}, expected str")
        fragments = self._special.split(_valid(text), parse_special)
        return self._ids(fragments, add_special, self._words.encode)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`: their bytes, one after another; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(index, skip_special) for index in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes one token adds to a text, which need not be whole characters. Control tokens add none."""
        index = int(token_id)
        if not 0 <= index < self.vocab_size:
            raise ValueError(f"token id {index} is outside the vocabulary of {self.vocab_size:,} tokens")
        text, kind = self._vocabulary.tokens[index], self._vocabulary.kinds[index]
        if kind in (Kind.CONTROL, Kind.UNKNOWN) and skip_special or kind == Kind.UNUSED:
            return b""
        if kind == Kind.BYTE:
            return _named_byte(text)
        if kind == Kind.NORMAL and self._vocabulary.model == BYTE_LEVEL:
            return piece_bytes(text)
        if kind == Kind.NORMAL:
            text = text.replace(SPACE, " ")
        return text.encode("utf-8", "surrogateescape")

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **template_variables: Any,
    ) -> str:
        """The text the model's chat template makes of `messages`."""
        return render_chat_template(
            self._template(tools),
            messages,
            add_generation_prompt,
            tools,
            **self._token_texts() | template_variables,
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **template_variables: Any,
    ) -> ChatPrompt:
        """The ids of a conversation. Only the template writes control tokens: what messages spell is text."""
        encode = functools.cache(self._words.encode)  # prefixes of the conversation share their fragments

        def ids(count: int, add_generation_prompt: bool) -> list[int]:
            def render(messages: Sequence[Message], tools: Sequence[Any] | None, **variables: Any) -> str:
                text = render_chat_template(
                    template, messages, add_generation_prompt, tools, **self._token_texts() | variables
                )
                return _valid(text)

            fragments = template_fragments(render, self._special, messages[:count], tools, template_variables)
            return self._ids(fragments, True, encode)

        template = self._template(tools)
        whole = ids(len(messages), add_generation_prompt)
        borders = set()
        for count in {1, *range(len(messages) - RECENT_BORDERS + 1, len(messages) + 1)}:
            if 1 <= count <= len(messages):
                try:
                    prefix = ids(count, False)
                except ChatTemplateError:  # the template wants another message here
                    continue
                if prefix and whole[: len(prefix)] == prefix:
                    borders.add(len(prefix))
        return ChatPrompt(whole, tuple(sorted(borders)))

    @functools.cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self._vocabulary)

    @functools.cached_property
    def _words(self) -> ByteLevelBPE | SentencePiece:
        return (ByteLevelBPE if self._vocabulary.model == BYTE_LEVEL else SentencePiece)(self._vocabulary)

    def _ids(
        self, fragments: list[str | int], add_special: bool, encode: Callable[[str], Sequence[int]]
    ) -> list[int]:
        ids = []
        for fragment in fragments:
            ids += [fragment] if isinstance(fragment, int) else encode(fragment)
        if add_special and self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self._vocabulary.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def _template(self, tools: Sequence[Any] | None) -> str:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if self.chat_template is not None:
            return self.chat_template
        if "<|im_start|>" in self._vocabulary.ids:
            return CHATML
        raise ValueError(
            "the model has no chat template (tokenizer.chat_template): it is probably not a chat model. "
            "Render the messages with render_chat_template and a template of your own, or pass a plain prompt"
        )

    def _token_texts(self) -> dict[str, str]:
        """The variables by which templates name special tokens."""
        ids = {
            "bos": self.bos_id,
            "eos": self.eos_id,
            "pad": self._vocabulary.padding_id,
            "unk": self._vocabulary.unknown_id,
        }
        return {
            f"{name}_token": self._vocabulary.tokens[index]
            for name, index in ids.items()
            if index is not None
        }


def _valid(text: str) -> str:
    """`text` with U+FFFD for lone surrogates, which have no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    return text


def _named_byte(text: str) -> bytes:
    """The byte a token named `<0xE9>` stands for; the text itself under any other name."""
    digits = text[3:-1] if text.startswith("<0x") and text.endswith(">") else ""
    return bytes.fromhex(digits) if len(digits) == 2 else text.encode("utf-8", "surrogateescape")
