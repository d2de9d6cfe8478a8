"""jaxserve: a functional JAX inference engine for GGUF language models.

    import jaxserve
    engine = jaxserve.Engine.load("model.gguf")
    print(engine.generate("Once upon a time", jaxserve.SamplingParams(max_tokens=64)).text)

The functional layer underneath (`load_weights`, `init_state`, `admit`, `prefill`, `decode`) is public too.
"""

from jaxserve.config import ModelConfig
from jaxserve.engine import Engine, Stream
from jaxserve.errors import (
    ContextLimitExceeded,
    EngineError,
    InvalidGGUF,
    InvalidState,
    JaxserveError,
    OutOfMemory,
    UnsupportedModel,
    UnsupportedTensorType,
)
from jaxserve.models.weights import Weights, load_weights
from jaxserve.params import SamplingParams
from jaxserve.results import Completion, PhaseTimings, Piece, TokenLogprobs
from jaxserve.sampling import Options, options
from jaxserve.session import Session
from jaxserve.state import State, init_state
from jaxserve.step import admit, decode, peek, prefill
from jaxserve.text.chat import render_chat_template
from jaxserve.text.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "ContextLimitExceeded",
    "Engine",
    "EngineError",
    "InvalidGGUF",
    "InvalidState",
    "JaxserveError",
    "ModelConfig",
    "Options",
    "OutOfMemory",
    "PhaseTimings",
    "Piece",
    "SamplingParams",
    "Session",
    "State",
    "Stream",
    "TokenLogprobs",
    "Tokenizer",
    "UnsupportedModel",
    "UnsupportedTensorType",
    "Weights",
    "admit",
    "decode",
    "init_state",
    "load_weights",
    "options",
    "peek",
    "prefill",
    "render_chat_template",
]
