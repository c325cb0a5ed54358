"""The documentation builds without a warning, and describes every public name."""

import inspect
import pathlib
import subprocess
import sys

import pytest
from sphinx.util.inventory import InventoryFile
from test_house import FIXED_NAMES

import jaxloop
from jaxloop import functional

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
COLABS = "quick_start custom_loop loop_language resume_anywhere scaling debugging".split()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, and what Sphinx had to say."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", DOCS, directory]
    return directory, subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def described(site):
    """The names in the inventory, by kind."""
    inventory = InventoryFile.loads((site[0] / "objects.inv").read_bytes(), uri="")
    return {kind: dict(names) for kind, names in inventory.data.items() if kind.startswith("py:")}


def test_it_builds_without_a_warning(site):
    assert site[1].returncode == 0 and not site[1].stderr, site[1].stdout + site[1].stderr


def test_each_page_and_each_notebook_is_there(site):
    pages = [path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md") if "_build" not in path.parts]
    assert len(pages) > 20
    for page in [*pages, *(pathlib.Path("notebooks", name) for name in COLABS)]:
        assert (site[0] / page.with_suffix(".html")).exists(), page


def test_the_site_needs_no_network(site):
    for page in site[0].rglob("*.html"):
        text = page.read_text()
        assert '<script src="http' not in text and '<link rel="stylesheet" href="http' not in text, page


def public_names(module):
    return {name for name in getattr(module, "__all__", dir(module)) if not name.startswith("_")}


@pytest.mark.parametrize(
    "name", sorted(each for each in public_names(jaxloop) if not inspect.ismodule(getattr(jaxloop, each)))
)
def test_each_public_name_is_described_once(described, name):
    kinds = [kind for kind, names in described.items() if f"jaxloop.{name}" in names]
    assert len(kinds) == 1


@pytest.mark.parametrize("module", FIXED_NAMES)
def test_each_fixed_name_is_described_where_experiments_import_it(described, module):
    names = {name for kind in described.values() for name in kind}
    for name in FIXED_NAMES[module].split():
        assert names & {f"jaxloop.{name}", f"jaxloop.{module}.{name}", f"jaxloop.types.{name}"}, name


def test_each_name_of_the_loop_language_is_described(described):
    names = {name.rpartition(".")[2] for kind in described.values() for name in kind}
    aliases = {each: getattr(getattr(functional, each), "__name__", each) for each in public_names(functional)}
    assert not [each for each, name in aliases.items() if not names & {each, name}]
