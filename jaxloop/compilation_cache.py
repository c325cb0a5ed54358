"""What XLA has compiled, kept for the next start of a program."""

import jax
from absl import logging
from etils import epath


def enable_compilation_cache(directory: epath.PathLike) -> None:
    """Has JAX keep all that it compiles in a directory, and take it from there the next time.

    It sets JAX's persistent compilation cache, `jax_compilation_cache_dir`, for the whole process, and the thresholds
    below which JAX keeps nothing (a second of compiling) to zero: with these, of a small model nothing would be kept.
    Call it before the first step. The same program then compiles nothing when it starts again, also after a crash; an
    entry is used by the same versions of jax and jaxlib on the same kind of device.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     enable_compilation_cache(directory)
    ...     jax.config.jax_compilation_cache_dir == directory
    True

    >>> jax.config.update("jax_compilation_cache_dir", None)

    Args:
      directory: made if it is not there; several processes may share it.

    Raises:
      OSError: the directory can't be made.
    """
    # `resolve` would make of a bucket's name a path of this machine.
    path = epath.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if before != str(path):
        # A program that has compiled something has settled on a cache, or on none.
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()
        logging.info("Compiled programs are kept in %s.", path)
