"""The contents of the sdist and the wheel, and what users get when they install them."""

import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import jaxloop

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLAIN_INSTALL = ROOT / "tests" / "programs" / "plain_install.py"

# `make test-wheel` runs the tests in a directory without the sources, so that they use the installed package.
SOURCES = ROOT / "jaxloop"
with_sources = pytest.mark.skipif(not SOURCES.exists(), reason="The sources of jaxloop are not here.")


def test_the_tests_use_the_adjacent_or_the_installed_jaxloop():
    expected = SOURCES if SOURCES.exists() else pathlib.Path(sysconfig.get_path("purelib"), "jaxloop")
    assert pathlib.Path(jaxloop.__file__).parent.resolve() == expected.resolve()


def run(*command, cwd=None, **variables):
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind, sources, directory):
    """Builds the wheel or the sdist with setuptools, as pip does, but in this environment and so without a network."""
    program = f"import sys, setuptools.build_meta as backend; backend.build_{kind}(sys.argv[1])"
    run("-W", "ignore", "-c", program, directory, cwd=sources)
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The directory of the unpacked sdist of the checkout."""
    sources, built = tmp_path_factory.mktemp("sources") / "jaxloop", tmp_path_factory.mktemp("sdist")
    anywhere = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "_build")
    not_of_git = lambda directory, names: anywhere(directory, names) | ({"runs"} if directory == str(ROOT) else set())
    shutil.copytree(ROOT, sources, ignore=not_of_git)
    with tarfile.open(build("sdist", sources, built)) as archive:
        archive.extractall(built, filter="data")
    return built / f"jaxloop-{jaxloop.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel, built from the sdist, which must therefore be complete."""
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A directory that contains only what the wheel installs."""
    directory = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:  # Enough to install a pure Python wheel.
        archive.extractall(directory)
    return directory


@with_sources
def test_the_wheel_contains_only_the_package(wheel):
    modules = {str(path.relative_to(ROOT)) for path in SOURCES.rglob("*.py")}
    about = {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "top_level.txt"}
    dist_info = f"jaxloop-{jaxloop.__version__}.dist-info"
    names = zipfile.ZipFile(wheel).namelist()
    assert set(names) == modules | {"jaxloop/py.typed"} | {f"{dist_info}/{name}" for name in about}
    assert len(names) == len(set(names))


@with_sources
def test_the_sdist_contains_everything_make_test_needs(sdist):
    for name in ["CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml", "requirements/oldest.txt"]:
        assert (sdist / name).is_file(), name
    for directory, pattern in [("benchmarks", "*.py"), ("colabs", "*"), ("docs", "*.md"), ("tests", "*.py")]:
        for path in (ROOT / directory).rglob(pattern):
            if path.is_file() and not {"_build", "notebooks", "__pycache__"} & set(path.relative_to(ROOT).parts):
                assert (sdist / path.relative_to(ROOT)).is_file(), path


@with_sources
def test_an_installed_wheel_trains_without_optional_packages(installed, tmp_path):
    printed = run("-W", "error", PLAIN_INSTALL, installed, cwd=tmp_path, PYTHONPATH=str(installed))
    assert printed == f"jaxloop {jaxloop.__version__} trains\n"


# Type checkers know the first of these after `import jaxloop` alone.
KNOWN_MODULES = "actions checkpoint data distributed partition schedules".split()
MODULES = [*KNOWN_MODULES, *"outer_loop.specs functional history models stat_loop".split()]


def public_names():
    """Yields the public names of the package and of the modules that users import from, with the methods of classes."""
    for module in [jaxloop, *(importlib.import_module(f"jaxloop.{name}") for name in MODULES)]:
        for name in getattr(module, "__all__", dir(module)):
            value = getattr(module, name)
            if not name.startswith("_") and is_ours(value):
                yield f"{module.__name__}.{name}"
                yield from (f"{module.__name__}.{name}.{method}" for method in public_methods(value))


def public_methods(value):
    """Yields the methods and properties of a class, except those that JAX calls or that Flax has added."""
    for base in filter(is_ours, value.__mro__ if isinstance(value, type) else ()):
        for name, member in vars(base).items():
            fields = getattr(base, "__dataclass_fields__", {})
            if not name.startswith(("_", "tree_")) and name not in fields and is_ours(getattr(member, "fget", member)):
                yield name


def is_ours(value):
    return getattr(value, "__module__", "").startswith("jaxloop")


@with_sources
@pytest.mark.xfail(np.lib.NumpyVersion(np.__version__) < "2.2.0", reason="optax.Schedule uses arrays of unknown type.")
def test_type_checkers_know_the_type_of_each_public_name(installed, tmp_path):
    """Checks them in a user's program, in pyright's strict mode, with the annotations that `py.typed` promises."""
    names = sorted(set(public_names()))
    assert {"jaxloop.fit", "jaxloop.Step.initialize_model", "jaxloop.functional.loop"} <= set(names)
    imports = [f"import jaxloop.{name}" for name in MODULES if name not in KNOWN_MODULES]
    lines = ["import jaxloop", *imports, "names: list[object] = [", *(f"    {name}," for name in names), "]"]
    (tmp_path / "program.py").write_text("\n".join(lines) + "\n")
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(installed)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    printed = run("-m", "pyright", "--pythonpath", sys.executable, "program.py", cwd=tmp_path)
    assert printed.splitlines()[-1].startswith("0 errors, 0 warnings"), printed


@with_sources
def test_no_public_name_lacks_an_annotation(installed, tmp_path):
    """Other types unknown to pyright come from packages without `py.typed`, such as Optax."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    command += ["--verifytypes", "jaxloop", "--ignoreexternal"]
    variables = {**os.environ, "PYTHONPATH": str(installed)}
    report = json.loads(subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True).stdout)
    symbols = [symbol for symbol in report["typeCompleteness"]["symbols"] if symbol["isExported"]]
    assert len(symbols) > 1000
    lacking = {
        f"{symbol['name']}: {diagnostic['message']}"
        for symbol in symbols
        for diagnostic in symbol["diagnostics"]
        if "missing" in diagnostic["message"] and not symbol["name"].startswith("jaxloop.examples.")
    }
    assert not lacking, "\n".join(sorted(lacking))


def test_the_oldest_tested_versions_are_the_lowest_allowed_ones():
    lines = [line for line in (ROOT / "requirements" / "oldest.txt").read_text().splitlines() if line[0] != "#"]
    tested = {pin.name: Version(str(pin.specifier).removeprefix("==")) for pin in map(Requirement, lines)}
    needs = map(Requirement, PROJECT["dependencies"])
    lowest = {need.name: Version(str(need.specifier).removeprefix(">=")) for need in needs}
    assert tested.pop("jaxlib") == tested["jax"]
    assert tested == lowest


def test_dir_shows_public_names_only():
    names = set(dir(jaxloop))
    assert {"__version__", "Step", "actions", "fit", "types"} < names
    assert not names & {"base", "engine", "experiment", "inspect", "models", "processes", "runs"}
    assert all(hasattr(jaxloop, name) for name in names)
