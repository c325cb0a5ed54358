"""How Sphinx builds the documentation: `make docs`.

Pages are Markdown (MyST), notebooks are shown as they were saved, the API reference comes from the docstrings. Nothing
is fetched from the network, neither to build nor to read.
"""

import ast
import html
import inspect
import os
import pathlib
import re
import shutil
import textwrap
import types

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

import jaxloop

project = "jaxloop"
author = "The jaxloop authors"
copyright = "The jaxloop authors"
release = version = jaxloop.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "jupyter_execute", "**/.ipynb_checkpoints"]
suppress_warnings = ["config.cache"]  # Those of myst-nb, whose options are not all picklable.

# Markdown, and the notebooks of colabs/, which are copied to where Sphinx finds them.
myst_enable_extensions = ["attrs_block", "colon_fence", "fieldlist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # A test executes them.
nb_ipywidgets_js = {}

# The button copies doctests without their prompts and outputs. Printed output has no button.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_selector = "div.highlight-python pre, div.highlight-sh pre, div.highlight-ipython3 pre"

# The API reference.
autodoc_default_options = {"member-order": "bysource", "show-inheritance": True}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # `time.perf_counter`, not what it is in memory.
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Hooks", "params_style")]
add_module_names = False
toc_object_entries_show_parents = "hide"

# Annotations that name classes of other packages link to their pages (see OTHER_PAGES), except for these.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(abc|collections|contextlib|datetime|enum|os|pathlib|typing|types)\..*"),
    (r"py:.*", r"(clu|etils|flax|jax|jaxlib|matplotlib|numpy|np|optax|orbax)\..*"),
    (r"py:.*", r"Figure"),
    (
        r"py:.*",
        r"jaxloop\.(data\.sources\.Wrapper|engine\.agenda\.Item|outer_loop\.(extension\.Extensions|specs\.RunSpec)|"
        r"functional\.log_entries\.NewestReady)",
    ),
    (r"py:.*", r"jaxloop\..*\._\w+"),  # What some functions return is to be called, not to be named.
]

# Where other projects describe what annotations name. Sphinx's intersphinx would have to download their inventories.
OTHER_PAGES = {
    "jax.Array": "https://docs.jax.dev/en/latest/_autosummary/jax.Array.html",
    "jax._src.mesh.Mesh": "https://docs.jax.dev/en/latest/jax.sharding.html#jax.sharding.Mesh",
    "flax.training.train_state.TrainState": "https://flax.readthedocs.io/en/stable/api_reference/flax.training.html",
    "optax._src.base.GradientTransformation": "https://optax.readthedocs.io/en/latest/api/transformations.html",
    "orbax.checkpoint.checkpoint_manager.CheckpointManager": (
        "https://orbax.readthedocs.io/en/stable/api_reference/checkpoint.checkpoint_manager.html"
    ),
    "os.PathLike": "https://docs.python.org/3/library/os.html#os.PathLike",
    "enum.Enum": "https://docs.python.org/3/library/enum.html#enum.Enum",
    "numpy.ndarray": "https://numpy.org/doc/stable/reference/generated/numpy.ndarray.html",
    **{
        f"collections.abc.{name}": f"https://docs.python.org/3/library/collections.abc.html#collections.abc.{name}"
        for name in ("Callable", "Hashable", "Iterable", "Iterator", "Mapping", "Sequence", "Set")
    },
}

html_theme = "furo"
html_title = f"jaxloop {release}"
html_static_path = ["_static"]
html_css_files = ["jaxloop.css"]
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "tango"
pygments_dark_style = "github-dark"

_FIRST_OF_LIST = re.compile(r"\s*([-*]|\d+\.) ")
_CODE = re.compile(r"(?<![`\\])`([^`]+)`(?!`)(?=(\w)?)")
_INHERITED = "\ue001From"  # Begins a paragraph that names what a class inherits.
_NO_COLON = "\ue000"  # Stands for a colon that napoleon shall not take for the end of a type.


def setup(app):
    jaxloop.fit = inspect.unwrap(jaxloop.fit)  # Autodoc looks up the names in its overloads where it was wrapped.
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", link_to_copies)
    # Before napoleon, which reads the sections, and after it.
    app.connect("autodoc-process-docstring", write_as_rst, priority=400)
    app.connect("autodoc-process-docstring", put_colons_back, priority=600)
    app.connect("autodoc-process-docstring", say_what_is_inherited, priority=700)
    app.connect("autodoc-before-process-signature", name_aliases)
    app.connect("autodoc-process-signature", show_defaults)
    app.connect("autodoc-process-bases", leave_out_private_bases)
    app.connect("missing-reference", link_to_other_projects)
    app.connect("doctree-resolved", link_code)
    app.connect("doctree-resolved", insert_pictures)
    app.connect("doctree-resolved", add_notebook_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# Notebooks ------------------------------------------------------------------------------------------


def copy_notebooks(app):
    """Makes docs/notebooks what colabs/ is; what is the same already stays, and is not built again."""
    copies = pathlib.Path(app.srcdir, "notebooks")
    sources = sorted(copies.parents[1].glob("colabs/*.ipynb"))
    copies.mkdir(exist_ok=True)
    for stale in {path.name for path in copies.glob("*.ipynb")} - {path.name for path in sources}:
        (copies / stale).unlink()
    for source in sources:
        copy = copies / source.name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            shutil.copy(source, copy)


def link_to_copies(app, docname, content):
    """Links to notebooks are such as can be followed in the repository."""
    content[0] = re.sub(r"\]\((\.\./)+colabs/(\w+\.ipynb)\)", r"](/notebooks/\2)", content[0])


def add_notebook_links(app, doctree, docname):
    """Adds, below the title of a notebook, links to download it and to open it in Colab.

    Colab needs the address of the repository: the environment variable JAXLOOP_REPOSITORY, such as
    `https://github.com/owner/name`. Without it, there is only a download.
    """
    if not docname.startswith("notebooks/"):
        return
    name = docname.removeprefix("notebooks/")
    links = [
        f'<a class="button" href="../_sources/notebooks/{name}.ipynb.txt" download="{name}.ipynb">Download notebook</a>'
    ]
    repository = os.environ.get("JAXLOOP_REPOSITORY", "")
    if repository.startswith("https://github.com/"):
        path = f"github/{repository.removeprefix('https://github.com/')}/blob/main/colabs/{name}.ipynb"
        links.insert(0, f'<a class="button" href="https://colab.research.google.com/{path}">Open in Colab</a>')
    title = next(doctree.findall(nodes.title))
    place = title.parent.index(title) + 1
    title.parent.insert(place, nodes.raw("", f'<p class="buttons">{" ".join(links)}</p>', format="html"))


# Pictures -------------------------------------------------------------------------------------------


def insert_pictures(app, doctree, docname):
    """Inserts SVG pictures into their pages, so that `currentColor` is the color of the page's text."""
    if app.builder.format != "html":
        return
    for image in list(doctree.findall(nodes.image)):
        path = pathlib.Path(app.srcdir, image["uri"])
        if path.suffix != ".svg" or "currentColor" not in (text := path.read_text()):
            continue
        text = re.sub(r"<style>svg\{color.*?</style>", "", text, count=1, flags=re.DOTALL)
        text = re.sub(r"<title>.*?</title>", "", text, count=1, flags=re.DOTALL)
        label = html.escape(image.get("alt", ""), quote=True)
        kind = "thumbnail" if "thumbnails" in path.parts else "picture"
        image.replace_self(
            nodes.raw("", f'<span class="{kind}" role="img" aria-label="{label}">{text}</span>', format="html")
        )


# Signatures -----------------------------------------------------------------------------------------

# Classes, in the place of what these names stand for.
_ALIASES = {name: type(name, (), {"__module__": "jaxloop.types"}) for name in ("BatchSpec", "Output", "PRNGType")}
_ALIASES["Batch"] = type("Batch", (), {"__module__": "jaxloop"})


def name_aliases(app, obj, bound_method):
    """Has annotations say `Batch`, as the source does, where Python only knows what that stands for."""
    obj = inspect.unwrap(obj)
    for name, text in _annotations_in_source(obj).items():
        if re.search(rf"\btypes\.({'|'.join(_ALIASES)})\b", text):
            known = {**obj.__globals__, "types": types.SimpleNamespace(**{**vars(jaxloop.types), **_ALIASES})}
            obj.__annotations__[name] = eval(text, known)


def _annotations_in_source(function):
    if not getattr(function, "__module__", "").startswith("jaxloop") or not inspect.isfunction(function):
        return {}
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError):  # One that a dataclass has made.
        return {}
    if not isinstance(found, ast.FunctionDef):
        return {}
    arguments = [*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs]
    nodes_ = {each.arg: each.annotation for each in arguments} | {"return": found.returns}
    return {name: ast.unparse(node) for name, node in nodes_.items() if node is not None}


def show_defaults(app, what, name, obj, options, signature, returned):
    """Shows the values of defaults that have names, or are made anew for each object."""
    if signature is not None:
        signature = signature.replace("NO_OPTIMIZER", "optax.identity()").replace("<factory>", "...")
        module = inspect.getmodule(obj)
        value = lambda it: f"{it[1]}{getattr(module, it[2])!r}" if hasattr(module, it[2]) else it[0]
        signature = re.sub(r"(?<==)( ?)(_?[A-Z][A-Z_]+)\b", value, signature)
    return signature, returned


# Docstrings: Google's sections, and Markdown --------------------------------------------------------


def write_as_rst(app, what, name, obj, options, lines):
    """Turns the Markdown of a docstring into reStructuredText: `code`, and lists that follow a line of text."""
    written = []
    for is_doctest, part in _parts(lines):
        text = part if is_doctest else _CODE.sub(_literal, "\n".join(_with_lists(part))).split("\n")
        written += text
    if what in ("attribute", "data", "property") and written:
        written[0] = written[0].replace(":", _NO_COLON)
    lines[:] = _without_types(written)


def _parts(lines):
    """The doctests of a docstring, and what is between them."""
    part, is_doctest = [], False
    for line in lines:
        starts = line.lstrip().startswith(">>>")
        if (starts and not is_doctest) or (is_doctest and not line.strip()):
            yield is_doctest, part
            part, is_doctest = [], starts
        part.append(line)
    yield is_doctest, part


def _with_lists(lines):
    """Puts an empty line before each list that follows a line of text: Markdown needs none."""
    written, in_list = [], False
    for line in lines:
        is_item = bool(_FIRST_OF_LIST.match(line))
        if is_item and not in_list and written and written[-1].strip():
            written.append("")
        in_list = is_item or (in_list and bool(line.strip()))
        written.append(line)
    return written


def _literal(found):
    return f"``{found[1]}``" + ("\\ " if found[2] else "")


def _without_types(lines):
    """Results have their types in the annotations, and errors of any type have none: both are sentences."""
    written, section, is_sentence = [], "", False
    for line in lines:
        if line.strip() and not line.startswith(" "):
            section, is_sentence = line.strip(), False
        elif section in ("Returns:", "Yields:"):
            line = line.replace(":", _NO_COLON)
        elif section == "Raises:" and re.match(r"  \S", line):
            if re.match(r"  [\w.]+: ", line):
                is_sentence = False
            else:
                line = f"    {line.strip()}" if is_sentence else f"  BaseException: {line.strip()}"
                is_sentence = True
        written.append(line)
    return written


def put_colons_back(app, what, name, obj, options, lines):
    lines[:] = [line.replace(_NO_COLON, ":") for line in lines]


def say_what_is_inherited(app, what, name, obj, options, lines):
    """Names, below the docstring of a class, the public methods and properties of its bases in jaxloop."""
    if what != "class" or not isinstance(obj, type):
        return
    seen = set(vars(obj))
    for base in obj.__mro__[1:]:
        if not base.__module__.startswith("jaxloop") or base.__name__.startswith("_"):
            continue
        place = base.__name__ if hasattr(jaxloop, base.__name__) else f"{base.__module__}.{base.__qualname__}"
        names = [each for each in vars(base) if not each.startswith("_") and each not in seen]
        seen.update(names)
        if names:
            code = " ".join(f"``{each}``" for each in names)
            lines += ["", f"{_INHERITED} ``{place}``: {code}"]


def leave_out_private_bases(app, name, obj, options, bases):
    bases[:] = [_public(base) for base in bases]


def _public(base):
    while isinstance(base, type) and base.__module__.startswith("jaxloop") and base.__name__.startswith("_"):
        base = base.__bases__[0]
    return base


# Pages ----------------------------------------------------------------------------------------------


# What pages call objects of a class, whose methods they name.
_OBJECTS = {
    "history": ["History"],
    "loop": ["Loop"],
    "outer_loop": ["OuterLoop"],
    "partitioner": ["Partitioner"],
    "state": ["TrainState"],
    "step": ["Step"],
    "test_loop": ["EvalLoop", "Loop"],
    "train_loop": ["TrainLoop", "ActionLoop", "Loop"],
    "train_step": ["Step"],
}


def link_code(app, doctree, docname):
    """Links code in backticks, on pages and in docstrings, to the public name that it is."""
    objects = app.env.get_domain("py").objects
    by_last_name = _by_last_name(objects)
    link = lambda target, node: make_refnode(app.builder, docname, target.docname, target.node_id, node)
    for paragraph in list(doctree.findall(nodes.paragraph)):
        if paragraph.astext().startswith(_INHERITED):
            _list_inherited(paragraph, objects, link)
        elif paragraph.astext() in ("Bases: object", "Bases: ABC"):
            paragraph.parent.remove(paragraph)
    for name in doctree.findall(nodes.field_name):
        if name.astext() == "Variables":  # As Sphinx calls what docstrings call attributes.
            name[:] = [nodes.Text("Attributes")]
    for node in list(doctree.findall(nodes.literal)):
        found = re.fullmatch(r"(?:jf\.)?([A-Za-z_][\w.]*)(\(.*\))?", node.astext(), flags=re.DOTALL)
        if not found or _is_inside(node, (nodes.reference, nodes.title, addnodes.pending_xref)):
            continue
        name = found[1]
        described = [each["ids"][0] for each in _descriptions(node) if each["ids"]]
        places = [f"{each}.{name}" for each in reversed(described)] + [f"jaxloop.{name}", name]
        if node.astext().startswith("jf.") or docname == "api/functional":
            places.insert(len(described), f"jaxloop.functional.{name}")
        *_, owner, last = ["", *name.split(".")]
        places += [f"jaxloop.{kind}.{last}" for kind in _OBJECTS.get(owner, ())]
        places += [by_last_name.get(name, "")]
        target = next((objects[place] for place in places if place in objects), None)
        if target is not None and target.node_id not in described:
            node.replace_self(link(target, node.deepcopy()))


def link_to_other_projects(app, env, node, contnode):
    """Links a name of another project to the page that describes it."""
    target = OTHER_PAGES.get(node.get("reftarget"))
    return target and nodes.reference("", "", contnode, refuri=target, internal=False)


def _by_last_name(objects):
    """The full names of classes and functions whose last name is theirs alone, and is no plain word."""
    full = {}
    for name, found in objects.items():
        last = name.rpartition(".")[2]
        is_word = last.islower() and "_" not in last
        if found.objtype in ("class", "exception", "function") and not is_word and ".functional." not in name:
            full.setdefault(last, set()).add(found.node_id)
    return {last: next(iter(ids)) for last, ids in full.items() if len(ids) == 1}


def _list_inherited(paragraph, objects, link):
    """Names, of what a class inherits, all that is described somewhere."""
    base, *names = [each.astext() for each in paragraph.children if isinstance(each, nodes.literal)]
    place = base if base in objects else f"jaxloop.{base}"
    names = [name for name in names if f"{place}.{name}" in objects]
    if not names:
        paragraph.parent.remove(paragraph)
        return
    paragraph[:] = [nodes.Text("From "), nodes.literal(base, base), nodes.Text(": ")]
    for name in names:
        code = nodes.literal(name, name)
        paragraph += [link(objects[f"{place}.{name}"], code), nodes.Text("." if name == names[-1] else ", ")]


def _is_inside(node, kinds):
    while node is not None:
        if isinstance(node, kinds):
            return True
        node = node.parent
    return False


def _descriptions(node):
    """The signatures of the objects in whose descriptions a node stands, from the outermost."""
    found = []
    while node is not None:
        if isinstance(node, addnodes.desc):
            found.insert(0, node[0])
        node = node.parent
    return found
