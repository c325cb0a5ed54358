"""The structure of the package: layers, sizes, restricted calls, public names and their documentation."""

import ast
import enum
import functools
import graphlib
import importlib
import inspect
import io
import pathlib
import re
import subprocess
import sys
import tokenize

import jax
import pytest

import jaxloop

PACKAGE = pathlib.Path(jaxloop.__file__).parent

# From the lowest layer to the highest: a package or top-level module imports only those of the layers below its own.
LAYERS = [
    "types schedules base",
    "metrics partition distributed checkpoint data",
    "history actions step",
    "engine",
    "loop stat_loop action_loop train_loop eval_loop",
    "outer_loop",
    "models functional check runs examples testing __main__",
]
LAYER_OF = {room: number for number, names in enumerate(LAYERS) for room in names.split()}
SATELLITES = set(LAYERS[-1].split())

# What else a room may import: some of the rooms of its own layer.
ALSO = {
    "base": "types",
    "schedules": "base",
    "actions": "history",
    "step": "actions",
    "stat_loop": "loop",
    "action_loop": "loop stat_loop",
    "train_loop": "action_loop",
    "eval_loop": "action_loop",
    "models": "check",  # `fit` returns the report of a check.
    "functional": "models",  # `FunctionStep` runs its functions.
    "runs": "check",
    "__main__": "runs",
}
# What a room may not import, although it is in a lower layer.
EXCEPT = {"engine": "checkpoint history data"}

MOST_ATTRIBUTES, MOST_METHODS = 8, 15

# `python tests/test_house.py` prints these four tables as the package is now. They may only shrink.
# The code lines of each package and top-level module, without blanks, comments and docstrings.
BUDGET = {
    "__init__": 62,
    "__main__": 67,
    "action_loop": 38,
    "actions": 1303,
    "base": 636,
    "check": 917,
    "checkpoint": 837,
    "data": 877,
    "distributed": 566,
    "engine": 1644,
    "eval_loop": 49,
    "examples": 134,
    "functional": 682,
    "history": 360,
    "loop": 74,
    "metrics": 278,
    "models": 1197,
    "outer_loop": 1446,
    "partition": 491,
    "runs": 1051,
    "schedules": 262,
    "stat_loop": 99,
    "step": 1154,
    "testing": 101,
    "train_loop": 38,
    "types": 173,
}
# The attributes and methods of the classes with more than the limits.
LARGE_CLASSES = {
    "actions.trackers._TrackerWriter": (8, 18),
    "base.timing.Spent": (10, 5),
    "engine.engine.Engine": (8, 28),
    "engine.rehearse.Course": (10, 11),
    "functional.callbacks.LoopState": (10, 0),
    "history.History": (7, 25),
    "loop.Loop": (2, 18),
    "partition.partitioner.Partitioner": (0, 17),
    "distributed.interrupt.Interruptible": (9, 15),
    "runs.status.Status": (10, 1),
    "step.step.Step": (13, 32),
}
# Imports of satellites by the rest of the package.
SATELLITE_IMPORTS = {
    "outer_loop -> check.preflight",
    "outer_loop -> runs",
}
# Other imports that the layers forbid.
OTHER_IMPORTS = {
    "base.text -> distributed",
    "checkpoint.weights -> metrics",
    "checkpoint.write -> distributed",
    "checkpoint.write -> distributed.agreement",
    "checkpoint.write -> distributed.lock",
    "engine.feed -> data.sources",
}


@functools.cache
def modules():
    """Returns the name and the syntax tree of each module."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    pairs = zip(names, paths, strict=True)
    return [(name, ast.parse(path.read_text())) for name, path in pairs if name != "__init__"]


def room_of(module):
    return module.partition(".")[0]


def imports_of(tree, names):
    """Returns the modules of the package that a module imports, at the top or in a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            paths = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {path if path.removeprefix("jaxloop.") in names else node.module for path in paths}
    return {name.removeprefix("jaxloop.") for name in found if name.removeprefix("jaxloop.") in names}


def import_graph():
    """Returns the modules that each module imports."""
    trees = dict(modules())
    return {name: imports_of(tree, trees) for name, tree in trees.items()}


def is_allowed(room, other):
    is_lower = LAYER_OF[other] < LAYER_OF[room] and other not in EXCEPT.get(room, "").split()
    return other == room or is_lower or other in ALSO.get(room, "").split()


def forbidden_imports():
    """Returns the imports of satellites by the rest of the package, and the other imports that the layers forbid."""
    arrows = [(name, other) for name, others in import_graph().items() for other in others]
    forbidden = [each for each in arrows if not is_allowed(*map(room_of, each))]
    outward = [each for each in forbidden if room_of(each[1]) in SATELLITES and room_of(each[0]) not in SATELLITES]
    as_text = lambda arrows: {f"{name} -> {other}" for name, other in arrows}
    return as_text(outward), as_text(forbidden) - as_text(outward)


def test_each_package_is_in_a_layer():
    assert {room_of(name) for name, _ in modules()} == set(LAYER_OF)


def test_the_rest_of_the_package_imports_no_satellite():
    imports, _ = forbidden_imports()
    assert imports - SATELLITE_IMPORTS == set(), "The heart of the package must work without its satellites."
    assert SATELLITE_IMPORTS - imports == set(), "Remove these from SATELLITE_IMPORTS."


def test_no_package_imports_a_higher_layer():
    _, imports = forbidden_imports()
    assert imports - OTHER_IMPORTS == set(), "A package imports only lower layers."
    assert OTHER_IMPORTS - imports == set(), "Remove these from OTHER_IMPORTS."


def test_imports_have_no_cycle():
    graphlib.TopologicalSorter(import_graph()).prepare()


def number_of_code_lines(source):
    """Returns the number of lines without blanks, comments and docstrings."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def code_lines():
    """Returns the number of code lines of each package and top-level module."""
    lines = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        lines[room] = lines.get(room, 0) + number_of_code_lines(path.read_text())
    return lines


def test_no_package_exceeds_its_budget():
    lines = code_lines()
    assert set(lines) == set(BUDGET)
    larger = {room: f"{number} code lines, budget {BUDGET[room]}" for room, number in lines.items()}
    assert not {room: text for room, text in larger.items() if lines[room] > BUDGET[room]}


def sizes_of_classes():
    """Returns the numbers of attributes and methods that each class defines itself.

    The attributes are those that its methods assign to `self`, and its annotated names.
    """
    sizes = {}
    for name, tree in modules():
        for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            methods = [each for each in kind.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            fields = [each.target for each in kind.body if isinstance(each, ast.AnnAssign)]
            attributes = {each.id for each in fields if isinstance(each, ast.Name)}
            for node in (node for method in methods for node in ast.walk(method)):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    attributes |= {node.attr} if ast.unparse(node.value) == "self" else set()
            sizes[f"{name}.{kind.name}"] = len(attributes), len({each.name for each in methods})
    return sizes


def large_classes():
    sizes = sizes_of_classes()
    return {name: size for name, size in sizes.items() if size[0] > MOST_ATTRIBUTES or size[1] > MOST_METHODS}


def test_no_class_is_too_large():
    large = large_classes()
    limits = {name: LARGE_CLASSES.get(name, (MOST_ATTRIBUTES, MOST_METHODS)) for name in large}
    larger = {name: size for name, size in large.items() if size[0] > limits[name][0] or size[1] > limits[name][1]}
    assert not larger, f"At most {MOST_ATTRIBUTES} attributes and {MOST_METHODS} methods, or as in LARGE_CLASSES."
    assert set(LARGE_CLASSES) - set(large) == set(), "Remove these from LARGE_CLASSES."


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("jax.device_get", {"metrics"}),
        ("jax.block_until_ready", {"metrics"}),
        ("orbax", {"checkpoint.listing", "checkpoint.read", "checkpoint.stored", "checkpoint.write"}),
        ("jax.device_put", {"partition.mesh_partitioner"}),
        (
            "NamedSharding",
            {"distributed.agreement", "partition.mesh_partitioner", "partition.laid_out"},
        ),
        ("pickle", set()),
        ("eval", set()),
        ("exec", set()),
    ],
)
def test_restricted_names_are_used_only_where_allowed(what, where):
    found = set()
    for name, tree in modules():
        if not name.startswith("examples"):
            code = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name | ast.alias)]
            texts = {ast.unparse(node).split(" as ")[0] for node in code}
            if any(text == what or text.startswith(f"{what}.") for text in texts):
                found.add(name)
    assert found == where


def test_internals_of_jax_are_used_only_in_two_functions():
    """After a change, adapt the list in docs/inside.md."""
    internals, found = ("jax._src", "jax.core", "jax.extend", "jax.interpreters"), set()
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax"):
                used = [f"{node.module}.{each.name}" for each in node.names]
            else:
                used = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            found |= {(name, part) for part in internals for each in used if f"{each}.".startswith(f"{part}.")}
    assert found == {
        ("base.checks", "jax.core"),
        ("check.step", "jax.extend"),
        ("check.step", "jax.interpreters"),
    }


def test_importing_jaxloop_is_cheap_and_does_not_change_the_jax_config():
    program = (
        "import jax; before = dict(jax.config.values); import jaxloop, sys;"
        "assert {name: jax.config.values[name] for name in before} == before;"
        "from jax._src import xla_bridge; assert not xla_bridge._backends, 'a backend was started';"
        "heavy = {'tensorflow', 'tensorflow_datasets', 'sklearn', 'tensorboardX', 'matplotlib', 'grain', 'torch',"
        "'tqdm', 'equinox', 'pandas', 'clu', 'mlflow', 'trackio', 'wandb', 'orbax'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


FIXED_NAMES = {
    "types": "TrainState State Batch BatchSpec Output PRNGType MetricType MetricWithMetadata",
    "partition": "Partitioner SingleDevicePartitioner DataParallelPartitioner SPMDPartitioner "
    "FSDPPartitioner RulesPartitioner ExplicitPartitioner",
    "step": "Step State Batch BatchSpec Output",
    "loop": "Loop State Batch BatchSpec Output",
    "stat_loop": "StatLoop STAT_NUM_PARAMS STAT_NUM_FLOPS STAT_INIT_TIME STAT_BEGIN_TIME STAT_LIFE_TIME_SECS "
    "STAT_LOOP_TIME_SECS STAT_STEPS_PER_SEC STAT_EXAMPLES_PER_SEC",
    "action_loop": "ActionLoop",
    "train_loop": "TrainLoop",
    "eval_loop": "EvalLoop",
    "actions": "Action SummaryAction CheckpointAction default_writer",
    "schedules": "Elapsed Schedule every at after first last always never",
    "history": "History",
    "outer_loop": "State Batch BatchSpec Output OuterLoop EvalSpec EvalContext CheckpointSpec STOP_LOOP",
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in FIXED_NAMES.items() for n in names.split()])
def test_public_names_are_in_their_modules(module, name):
    value = getattr(importlib.import_module(f"jaxloop.{module}"), name)
    assert getattr(jaxloop, name, value) is value


def test_the_reference_lists_the_names_of_the_package():
    pages = [page.read_text() for page in (PACKAGE.parent / "docs" / "api").glob("*.md")]
    listed = {
        name
        for page in pages
        for name in re.findall(r"(?:class|function|exception|data):: jaxloop\.(\w+)$", page, flags=re.MULTILINE)
    }
    names = {name for name in dir(jaxloop) if not (inspect.ismodule(getattr(jaxloop, name)) or name.startswith("_"))}
    assert listed | {"TrainState"} == names


# Methods that another library's protocol requires, and classes whose interface another jaxloop class documents.
PROTOCOL_METHODS = ("tree_flatten", "tree_flatten_with_keys", "tree_unflatten", "get_state", "set_state")
DOCUMENTED_ELSEWHERE = (*(f"actions.trackers.{name}Writer" for name in ("Mlflow", "Trackio", "Wandb")),)


def public_definitions():
    """Yields the public functions and classes of all modules, and the methods that don't override inherited ones."""
    for name, tree in modules():
        if name.startswith("examples."):
            continue
        module = importlib.import_module(f"jaxloop.{name}")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                value = getattr(module, node.name)
                yield f"{name}.{node.name}", value
                if isinstance(value, type):
                    inherited = {each for base in value.__mro__[1:] for each in vars(base)}
                    for each, member in vars(value).items():
                        is_function = callable(member) or isinstance(member, property | classmethod | staticmethod)
                        is_exempt = each in PROTOCOL_METHODS or f"{name}.{node.name}" in DOCUMENTED_ELSEWHERE
                        is_exempt |= each in getattr(value, "__dataclass_fields__", {})
                        if is_function and not is_exempt and not each.startswith("_") and each not in inherited:
                            yield f"{name}.{node.name}.{each}", member


def test_public_names_have_docstrings():
    definitions = dict(public_definitions())
    assert len(definitions) > 500
    lacking = [name for name, value in definitions.items() if not (value.__doc__ or "").strip()]
    assert not lacking, lacking


MOST_ABSTRACT_METHODS = 6


def classes():
    """Yields the name and the value of each class defined by the modules, except the examples."""
    for name, tree in modules():
        if not name.startswith("examples"):
            module = importlib.import_module(f"jaxloop.{name}")
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    yield f"{name}.{node.name}", getattr(module, node.name)


PUBLIC_CLASSES = {
    name: kind
    for name, kind in classes()
    # An exception may always have more specific subclasses.
    if not kind.__name__.startswith("_") and not issubclass(kind, BaseException)
}


def is_final(kind):
    # An enumeration with members can't be subclassed.
    return "__final__" in vars(kind) or issubclass(kind, enum.Enum)


def hooks_of(kind):
    """Returns the names in the `Hooks` section of the docstring, which lists what a subclass may override."""
    section = re.search(r"^Hooks:\n((?: .*\n?)+)", inspect.cleandoc(kind.__doc__ or ""), flags=re.MULTILINE)
    lines = section[1].splitlines() if section else []
    return [name for line in lines if re.match(r"  \S", line) for name in line.partition(":")[0].strip().split(", ")]


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_a_public_class_is_abstract_or_final_or_documents_its_hooks(name):
    kind = PUBLIC_CLASSES[name]
    is_abstract = inspect.isabstract(kind) or getattr(kind, "_is_protocol", False)
    hooks = hooks_of(kind)
    assert is_abstract or is_final(kind) or hooks
    assert not (is_final(kind) and (is_abstract or hooks))
    assert len(getattr(kind, "__abstractmethods__", ())) <= MOST_ABSTRACT_METHODS
    missing = [hook for hook in hooks if not hasattr(kind, hook)]
    assert not missing


def test_a_final_class_has_no_subclass():
    subclassed = {base for _, kind in classes() for base in kind.__mro__[1:]}
    assert not [name for name, kind in PUBLIC_CLASSES.items() if is_final(kind) and kind in subclassed]


def test_these_tests_run_on_eight_devices():
    assert jax.device_count() == 8


def print_tables():
    """Prints the present tables of exceptions."""
    imports, others = forbidden_imports()
    print("# The code lines of each package and top-level module, without blanks, comments and docstrings.")
    print("BUDGET = {", *(f"    {room!r}: {number}," for room, number in code_lines().items()), "}", sep="\n")
    print("# The attributes and methods of the classes with more than the limits.")
    print("LARGE_CLASSES = {", *(f"    {name!r}: {size}," for name, size in large_classes().items()), "}", sep="\n")
    print("# Imports of satellites by the rest of the package.")
    print("SATELLITE_IMPORTS = {", *(f"    {each!r}," for each in sorted(imports)), "}", sep="\n")
    print("# Other imports that the layers forbid.")
    print("OTHER_IMPORTS = {", *(f"    {each!r}," for each in sorted(others)), "}", sep="\n")


if __name__ == "__main__":
    print_tables()
