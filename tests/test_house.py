"""The structure of the package: import order, restricted calls, public names and their documentation."""

import ast
import enum
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import jaxloop

PACKAGE = pathlib.Path(jaxloop.__file__).parent

# From the lowest layer to the highest: a module imports only modules listed before it.
ORDER = """types structures flat_state distributed text files encoding compilation_cache checks interrupt agreement
lock schedules timing run_log accounts layout cost topology partition.partitioner partition.meshes
partition.single_device partition.mesh_partitioner partition.data_parallel partition.laid_out partition.fsdp
partition.rules partition.spmd partition.explicit partition.choice partition models metrics engine
nonfinite history seal path_patterns optimizers safetensors_file checkpoint
read_ahead fingerprint sources batching position data actions.action
actions.writer_queue actions.monitor actions.checkpoint_action actions.early_stopping_action actions.spike_guard
actions.learning_rate_action actions.periodic_action actions.profile_action actions.progress_action
actions.summary_action actions.event_file actions.writers actions.trackers actions.action_list actions
compiled step_runner step engine.outputs engine.feed engine.program engine.auto engine.agenda engine.run engine.plan
loss_step function_step exporting counting commands engine.engine loop stat_loop action_loop train_loop eval_loop
specs check.costs check forecast detours whole_run evaluations training
preflight.report preflight.experiment preflight.step preflight.data preflight.checkpoints preflight.actions preflight
failures watchdog outer_loop rewinding functional.log_entries functional.loop_state functional.tools
functional.callbacks functional.running functional fitting testing examples comparison status
__main__
""".split()


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            yield name, ast.parse(path.read_text())


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_imports_a_higher_layer():
    for name, tree in modules():
        place = ORDER.index(name if name in ORDER else name.split(".")[0])
        for imported in imported_modules(tree):
            other = imported.removeprefix("jaxloop.")
            if imported.startswith("jaxloop.") and other in ORDER:
                assert ORDER.index(other) <= place, f"{name} imports {other}, which is in a higher layer"


MESH_MODULES = [f"partition.{name}" for name in ("mesh_partitioner", "data_parallel", "laid_out", "spmd", "explicit")]


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("jax.device_get", {"metrics"}),
        ("jax.block_until_ready", {"metrics"}),
        ("orbax", {"checkpoint"}),
        ("jax.device_put", {"partition.mesh_partitioner"}),
        ("NamedSharding", {"agreement", "layout", *MESH_MODULES}),
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


def test_importing_jaxloop_is_cheap_and_does_not_change_the_jax_config():
    program = (
        "import jax; before = dict(jax.config.values); import jaxloop, sys;"
        "assert {name: jax.config.values[name] for name in before} == before;"
        "from jax._src import xla_bridge; assert not xla_bridge._backends, 'a backend was started';"
        "heavy = {'tensorflow', 'tensorflow_datasets', 'sklearn', 'tensorboardX', 'matplotlib', 'grain', 'torch',"
        "'tqdm', 'equinox', 'haiku', 'pandas', 'clu', 'mlflow', 'trackio', 'wandb'};"
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
    if not name.startswith("STAT_"):
        assert getattr(jaxloop, name) is value


# Methods that another library's protocol requires, and classes whose interface another jaxloop class documents.
PROTOCOL_METHODS = ("tree_flatten", "tree_flatten_with_keys", "tree_unflatten", "get_state", "set_state")
DOCUMENTED_ELSEWHERE = (
    "actions.writers.LogWriter",
    *(f"actions.trackers.{name}Writer" for name in ("Mlflow", "Trackio", "Wandb")),
)


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
