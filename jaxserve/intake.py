"""From what a caller passes to a request. All that can be refused is refused here, before any device work."""

import itertools
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve import sampling
from jaxserve.config import ModelConfig
from jaxserve.errors import ContextLimitExceeded, JaxserveError, UnsupportedModel
from jaxserve.gguf.reader import GGUFFile
from jaxserve.params import SamplingParams
from jaxserve.request import Request
from jaxserve.text.stream import TextStream

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray


class Intake:
    """Makes the requests of one model: knows its vocabulary, its tokenizer and the engine's context."""

    def __init__(self, file: GGUFFile, config: ModelConfig, context: int):
        self.file, self.config, self.context = file, config, context
        self._numbers = itertools.count()
        self._tokenizer: Tokenizer | UnsupportedModel | None = None

    @property
    def tokenizer(self) -> "Tokenizer":
        """The file's own tokenizer. Raises UnsupportedModel where the file has none that is known."""
        if self._tokenizer is None:
            from jaxserve.text.tokenizer import Tokenizer  # text libraries load only when text is used

            try:
                self._tokenizer = Tokenizer.from_metadata(self.file.metadata)
            except UnsupportedModel as error:
                self._tokenizer = error
        if isinstance(self._tokenizer, UnsupportedModel):
            raise self._tokenizer
        return self._tokenizer

    def request(self, prompt: Prompt, params: SamplingParams | None, borders: Sequence[int] = ()) -> Request:
        """A request to submit. `borders`: lengths of the prompt at which a message ends."""
        called = time.perf_counter()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params={params!r}: expected a SamplingParams")
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: pass some text")
            prompt = self.tokenizer.encode(prompt)
        ids = self.check_prompt(prompt)
        tokenizer = self._text_or_none(required=bool(params.stop))
        seed = secrets.randbits(64) if params.seed is None else params.seed
        end_ids = tokenizer.end_ids if tokenizer else self._end_ids_without_tokenizer()
        options = sampling.options(params, end_ids=end_ids, seed=seed, vocab_size=self.config.vocab_size)
        limit = min(params.max_tokens, self.context - len(ids) + 1)
        text = TextStream(tokenizer, params.stop) if tokenizer else None
        number = next(self._numbers)
        return Request(number, ids, params, options, limit, text, called=called, borders=borders)

    def check_prompt(self, prompt: Sequence[int] | np.ndarray) -> np.ndarray:
        """Ids as an array of its own. [n] i32"""
        if isinstance(prompt, (str, bytes)):
            raise TypeError(f"the prompt is {type(prompt).__name__}: expected a sequence of token ids")
        ids = np.asarray(prompt)
        if ids.ndim != 1:
            raise TypeError(f"the prompt has shape {ids.shape}: expected one sequence of token ids")
        if ids.size == 0:
            raise ValueError("the prompt is empty: pass at least one token id")
        if ids.dtype.kind in "fO" and all(isinstance(i, int) for i in prompt):  # one is beyond 64 bits
            ids = np.array(prompt, object)
        elif not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"the prompt holds {ids.dtype}: expected integer token ids")
        wrong = (ids < 0) | (ids >= self.config.vocab_size)
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"token id {ids[at]} at position {at} is outside the vocabulary: "
                f"expected 0 ≤ id < {self.config.vocab_size:,}"
            )
        if ids.size > self.context:
            raise ContextLimitExceeded(ids.size, self.context)
        return ids.astype(np.int32)

    def _text_or_none(self, *, required: bool):
        """The tokenizer, or None where the file has none and ids are enough."""
        try:
            return self.tokenizer
        except JaxserveError:
            if required:
                raise
            return None

    def _end_ids_without_tokenizer(self) -> list[int]:
        ids = (self.file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return [i for i in ids if i is not None and 0 <= i < self.config.vocab_size]
