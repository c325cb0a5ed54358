"""A function that enables JAX's persistent compilation cache."""

import jax
from absl import logging
from etils import epath

from jaxloop.base import files


def enable_compilation_cache(directory: epath.PathLike) -> None:
    """Caches everything that JAX compiles, so that a restarted program doesn't need to compile it again.

    This function enables JAX's persistent compilation cache (the option `jax_compilation_cache_dir`) for the whole
    process. It also removes JAX's thresholds for caching. By default, JAX caches only programs that took at least one
    second to compile, which excludes the steps of small models. Call this function before the first step. As long as
    the program, the jax and jaxlib versions and the device type are unchanged, a restarted program doesn't compile
    anything, even after a crash.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     enable_compilation_cache(directory)
    ...     jax.config.jax_compilation_cache_dir == directory
    True

    >>> jax.config.update("jax_compilation_cache_dir", None)

    Args:
      directory: The cache directory. It is created if necessary, and several processes may share it.

    Raises:
      OSError: If the directory can't be created.
    """
    path = files.absolute(directory)
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # If the program has already compiled something, JAX has already decided which cache to use, if any.
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    logging.info("Compiled programs are cached in %s.", path)
