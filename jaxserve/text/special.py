"""Cuts text at the texts of special tokens."""

import functools
import itertools
from collections.abc import Iterable

from jaxserve.text.vocabulary import Kind, Vocabulary

PREFIX_CHARACTERS = 4  # special texts are grouped by how they begin: gemma3 has 6,000 that begin with "<unu"
WHITE_SPACE = " \t\n\v\f\r"


class SpecialTokens:
    """The control, unknown and user-defined tokens of a vocabulary, longest text (in bytes) first.

    Control and unknown tokens are only recognised where the caller asks for it; user-defined ones always are.
    """

    def __init__(self, vocabulary: Vocabulary):
        kinds, tokens = vocabulary.kinds, vocabulary.tokens
        special = [
            i for i, kind in enumerate(kinds) if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
        ]
        special.sort(key=lambda index: -len(tokens[index].encode("utf-8", "surrogateescape")))
        self.control_ids = frozenset(index for index in special if kinds[index] != Kind.USER_DEFINED)
        self._strip_after = vocabulary.strip_after
        self._groups: dict[str, list[tuple[int, str, int]]] = {}
        for rank, index in enumerate(special):
            text = tokens[index]
            self._groups.setdefault(text[:PREFIX_CHARACTERS], []).append((rank, text, index))

    def occurring(self, text: str) -> list[tuple[str, int]]:
        """(text, id) of the special tokens that `text` spells somewhere, longest first."""
        groups = [group for prefix, group in self._groups.items() if prefix in text]
        return [(needle, index) for _, needle, index in sorted(sum(groups, [])) if needle in text]

    @functools.cached_property
    def first_signs(self) -> frozenset[str]:
        """The characters that control texts begin with, but letters, digits, underscores and white space."""
        entries = itertools.chain(*self._groups.values())
        first = {text[0] for _, text, index in entries if index in self.control_ids}
        return frozenset(sign for sign in first if not (sign.isalnum() or sign.isspace() or sign == "_"))

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """`text` as stretches of ordinary text (never empty, never two in a row) and ids of special tokens.

        The longest special text takes all its places in the whole text before the next one looks, as in
        llama.cpp: this is not leftmost-longest.
        """
        fragments: list[str | int] = [text]
        for needle, index in self.occurring(text):
            if parse_special or index not in self.control_ids:
                fragments = [piece for fragment in fragments for piece in self._cut(fragment, needle, index)]
        return [fragment for fragment in fragments if fragment != ""]

    def _cut(self, fragment: str | int, needle: str, index: int) -> Iterable[str | int]:
        if isinstance(fragment, int):
            return (fragment,)
        first, *rest = fragment.split(needle)
        if index in self._strip_after:
            rest = [piece.lstrip(WHITE_SPACE) for piece in rest]
        return [first, *(part for piece in rest for part in (index, piece))]
