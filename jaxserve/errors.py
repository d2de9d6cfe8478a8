"""Every error jaxserve raises on purpose. Bad arguments are plain `ValueError` / `TypeError`."""


class JaxserveError(Exception):
    """Base of all errors below."""


class ContextLimitExceeded(JaxserveError):
    """A prompt has more tokens than the engine's context."""

    def __init__(self, provided: int, maximum: int):
        self.provided, self.maximum = provided, maximum
        super().__init__(
            f"prompt has {provided:,} tokens, context is {maximum:,}: load with context={provided} or more, "
            "or shorten the prompt"
        )


class InvalidGGUF(JaxserveError):
    """The file is not a well-formed GGUF file; the message names the field."""


class UnsupportedModel(JaxserveError):
    """A well-formed file whose architecture or tokenizer jaxserve does not implement."""


class UnsupportedTensorType(JaxserveError):
    """A tensor of a ggml type nobody here can decode."""


class InvalidState(JaxserveError):
    """A saved-state file is damaged, or belongs to another model or kv dtype."""


class OutOfMemory(JaxserveError):
    """The device cannot hold what was asked for."""

    def __init__(
        self, needed: int, available: int, remedy: str = "load with a smaller context or fewer slots"
    ):
        self.needed, self.available = needed, available
        super().__init__(
            f"needs {needed / 2**20:,.0f} MiB on the device, {available / 2**20:,.0f} MiB are free: {remedy}"
        )


class EngineError(JaxserveError):
    """A step failed on the device; the engine has reset itself and serves the next call."""
