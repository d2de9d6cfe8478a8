"""GGUF files: bytes → a validated header, hyper-parameters, raw tensors. No JAX here."""
