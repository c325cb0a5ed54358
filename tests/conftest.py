"""Eight virtual CPU devices, strict types and ranks, and what several tests share."""

import _thread
import os
import shutil
import signal
import sys
import tempfile

# Shells make background processes ignore Ctrl-C, and their child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Most tests compile the same few small programs. A compilation cache makes this happen once per session: the workers of
# pytest-xdist and the programs that tests start find its directory in their environment. Files that tests write are
# kept in memory if there is room, and are deleted at the end (`--basetemp=DIRECTORY` keeps the `tmp_path` directories).
if "PYTEST_XDIST_WORKER" not in os.environ:
    _MEMORY = "/dev/shm"
    _HAS_ROOM = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 2**30
    _SCRATCH = tempfile.TemporaryDirectory(
        prefix="jaxloop_tests_", dir=_MEMORY if _HAS_ROOM else None, ignore_cleanup_errors=True
    )
    os.chmod(_SCRATCH.name, 0o711)  # So that tests that switch to another user can enter it.
    os.environ["TMPDIR"] = tempfile.tempdir = _SCRATCH.name
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(_SCRATCH.name, "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# JAX reads this when it starts. With fewer threads, several devices on few cores deadlock.
os.environ["NPROC"] = "32"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

import functools
import logging as python_logging

import numpy as np
import pytest
from absl import logging
from jax.sharding import Mesh
from programs.check_first import check_first

from jaxloop import metrics, partition
from jaxloop.base import timing

# Tests of complete programs, notebooks, builds and multi-process jobs. `make test` leaves them to `make test-slow`.
SLOW_FILES = [
    "test_distributed.py",
    "test_recipes.py",
    "test_colabs.py",
    "test_docs.py",
    "test_rewinding.py",
    "test_digits.py",
    "test_faults.py",
    "test_mnist_tutorial.py",
    "test_watchdog.py",
    "test_transformer.py",
    "test_docs_build.py",
    "test_benchmarks.py",
    "test_packaging.py",
]
# These run first. Otherwise, one of the two workers would still be running them while the other is idle.
LONGEST_FILES = [*SLOW_FILES, "test_runs.py", "test_layouts.py", "test_whole_run.py", "test_optimizers.py"]


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if item.path.name in SLOW_FILES:
            item.add_marker("slow")


@pytest.fixture
def set_clock(monkeypatch):
    """Returns a function that replaces the clock of everything that is made afterwards, and returns the new clock."""
    return lambda clock: monkeypatch.setattr(timing, "clock", clock) or clock


class RecordingWriter:
    """Records the calls of the methods of clu's `MetricWriter`. It has no `write_notes`."""

    def __init__(self):
        self.written = []
        self.flushes = 0

    def __getattr__(self, name):
        if not name.startswith("write_") or name == "write_notes":
            raise AttributeError(name)

        def write(step, values, **options):
            self.written.append((name, step, values, options) if options else (name, step, values))

        return write

    def flush(self):
        self.flushes += 1

    def scalars(self, name):
        """Returns the `(step, value)` pairs that were written under a name."""
        calls = [call for call in self.written if call[0] == "write_scalars"]
        return [(step, values[name]) for _, step, values in calls if name in values]


@pytest.fixture
def writer():
    return RecordingWriter()


@pytest.fixture
def assert_same():
    """Asserts that the leaves of two trees are bit-identical. Their static fields may differ."""

    def compare(one, two):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
            np.testing.assert_array_equal(a, b)

    return compare


@pytest.fixture
def assert_close():
    """Asserts that the leaves of two trees are equal up to a tolerance. Their static fields may differ."""

    def compare(one, two, **tolerance):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
            np.testing.assert_allclose(a, b, **tolerance)

    return compare


@pytest.fixture
def reads(monkeypatch):
    """The names of the functions that have read device values or waited for them, one for each call."""
    names = []

    def noting(name, function, tree):
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):
            names.append(name)
        return function(tree)

    for name in ("fetch", "fetch_scalar", "wait"):
        monkeypatch.setattr(metrics, name, functools.partial(noting, name, getattr(metrics, name)))
    return names


@pytest.fixture
def interrupted():
    """Iterates over batches, and simulates Ctrl-C before it yields the batch at an index."""

    def iterate(batches, number):
        for index, batch in enumerate(batches):
            if index == number:
                _thread.interrupt_main()
            yield batch

    return iterate


@pytest.fixture
def data_parallel():
    """Returns a `DataParallelPartitioner` over the first `n` devices."""
    return lambda n: partition.DataParallelPartitioner(Mesh(np.array(jax.devices()[:n]), ("data",)), "data")


@pytest.fixture
def logs(caplog):
    """The log records of the test, from level INFO up."""
    caplog.set_level(python_logging.INFO, logger="absl")
    logging.set_verbosity(logging.INFO)
    yield caplog
    logging.set_verbosity(logging.WARNING)


@pytest.fixture
def warnings_logged(logs):
    """Returns the messages of all warnings logged so far."""
    return lambda: [record.getMessage() for record in logs.records if record.levelno >= python_logging.WARNING]


@pytest.fixture
def checked_first():
    """Calls `check` before each run of an `OuterLoop`, and fails if it finds a problem."""
    undo = check_first()
    yield
    undo()


@pytest.fixture(scope="module")
def compile_fast():
    """Turns off most XLA optimizations, for programs that take longer to compile than to run."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def no_bars_of_other_tests():
    """Forgets the progress bars that a test leaves open. tqdm would draw later bars below them."""
    yield
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm._instances.clear()
