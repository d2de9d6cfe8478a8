"""Engines that tests share: one per kind and process, because loading one compiles all its programs.

The scripted model has a token per byte, whose successors are drawn at random, and chains: tokens that follow
each other with certainty, so that a test decides what a generation says and how it is cut into tokens.
"""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import jaxserve
from tests.crafted import scripted_model, tiny_tokenizer_metadata
from tests.oracle import tiny_path

FOLDER = Path(tempfile.mkdtemp(prefix="jaxserve-tests-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

BYTES = 256  # ids 0 … 255 are the bytes themselves
BOS, END, TURN_END = 256, 257, 258  # "<s>", "</s>", "<|eot_id|>"
CONTROL = ["<s>", "</s>", "<|eot_id|>"]
CERTAIN = 40.0  # logits by which a scripted successor leads
CHAINS: dict[str, tuple[Sequence[str | bytes], int]] = {
    # name → the pieces that follow its start token, and the end token behind them
    "greek": (["al", "pha be", "ta ga", "mma x", " more"], END),
    "accents": ([b"\xc3", b"\xa9", b"\xe8", b"\xaa", b"\x9e"], END),
    "family": ([bytes([byte]) for byte in "👩‍👩‍👧".encode()], TURN_END),
    "spaces": ([" a", " few", "    ", ".", " words "], END),
    "broken": (["ok", b"\xe8", b"\xaa"], END),
    "empty": ([], END),
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Script:
    """The ids of the scripted model."""

    def __init__(self) -> None:
        self.pieces: list[str | bytes] = [bytes([i]) for i in range(BYTES)] + CONTROL
        self.start: dict[str, int] = {}  # chain → the token a prompt ends with
        self.tokens: dict[str, list[int]] = {}
        self.follows: dict[int, int] = {}
        self.overflow = self._add("[overflow]")  # its logits are not finite
        self.late_overflow = self._add("[late]")  # its successor's are not
        self.follows[self.late_overflow] = self.overflow
        for name, (pieces, end) in CHAINS.items():
            ids = [self._add(f"[{name}]"), *[self._add(piece) for piece in pieces]]
            self.follows |= dict(zip(ids, [*ids[1:], end], strict=True))
            self.start[name], self.tokens[name] = ids[0], ids[1:]
        self.vocab = len(self.pieces)

    def _add(self, piece: str | bytes) -> int:
        self.pieces.append(piece)
        return len(self.pieces) - 1

    def logits(self) -> np.ndarray:
        """f64 [V, V]: bytes lead to bytes, by random logits; BOS and the end tokens lead to bytes too."""
        table = np.full((self.vocab, self.vocab), -CERTAIN)
        table[: TURN_END + 1, :BYTES] = np.random.default_rng(0).normal(0, 1, (TURN_END + 1, BYTES))
        for token, successor in self.follows.items():
            table[token, successor] = CERTAIN
        table[self.overflow] = 4e39
        return table

    def text(self, name: str) -> str:
        """What a chain says."""
        pieces = (piece.encode() if isinstance(piece, str) else piece for piece in CHAINS[name][0])
        return b"".join(pieces).decode("utf-8", "replace")


SCRIPT = Script()


@functools.cache
def scripted_path(*, tokenizer: bool = True, architecture: str = "llama", context: int = 512) -> Path:
    """The scripted model's file, with a tokenizer or without."""
    keys = tiny_tokenizer_metadata(
        SCRIPT.pieces, control=[BOS], bos=BOS, eos=[END, TURN_END], chat_template=TEMPLATE
    )
    return scripted_model(
        FOLDER / f"{architecture}-{tokenizer}-{context}.gguf",
        SCRIPT.logits(),
        architecture=architecture,
        context=context,
        tokenizer=keys if tokenizer else None,
        metadata=None if tokenizer else {"tokenizer.ggml.eos_token_id": END},
    )


@functools.cache
def scripted(
    *, slots: int = 1, tokenizer: bool = True, context: int = 64, reuse: bool = True
) -> jaxserve.Engine:
    """A shared engine of the scripted model. Without reuse every prompt is computed."""
    path = scripted_path(tokenizer=tokenizer)
    return _load(path, context, slots, reuse)


@functools.cache
def tiny(name: str, *, slots: int = 1, context: int = 192, reuse: bool = True) -> jaxserve.Engine:
    """A shared engine of a tiny random model, all arithmetic in float32."""
    return _load(tiny_path(name), context, slots, reuse)


def _load(path: Path, context: int, slots: int, reuse: bool) -> jaxserve.Engine:
    tiers = {} if reuse else {"residency": False, "prefix_bytes": 0}
    shape = {"context": context, "slots": slots, "kv_dtype": "float32", "weights": "float32"}
    return jaxserve.Engine.load(path, **shape, **tiers)


@functools.cache
def tiny_weights(name: str) -> tuple[jaxserve.Weights, jaxserve.ModelConfig]:
    """A tiny model for the functional layer."""
    return jaxserve.load_weights(tiny_path(name), weights="float32")
