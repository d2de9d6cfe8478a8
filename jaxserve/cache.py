"""The persistent compilation cache: a second start loads its programs instead of compiling them.

Whoever can write to the folder can run code: it is a per-user folder, and `JAX_COMPILATION_CACHE_DIR` names
another.
"""

import os
import tempfile
import warnings
from pathlib import Path

import jax


def default_folder() -> Path:
    """Where compiled programs are kept unless `JAX_COMPILATION_CACHE_DIR` says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxserve" / "compiled"


def enable_compilation_cache() -> None:
    """Turn the cache on, once per process. A folder that cannot be used warns and is done without."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(default_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not jax.config.jax_enable_compilation_cache:
        return
    folder = jax.config.jax_compilation_cache_dir
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        warnings.warn(
            f"compilation cache {folder} cannot be used ({error}): every start compiles anew", stacklevel=3
        )
        jax.config.update("jax_enable_compilation_cache", False)
