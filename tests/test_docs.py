"""Tests that the programs of the documentation run, and print what the pages show."""

import ast
import pathlib
import re
from xml.etree import ElementTree

import jax
import pytest
from programs.launching import launch
from test_recipes import PROGRAMS as RECIPES
from test_recipes import assert_prints, outputs

import jaxloop

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(jaxloop.__file__).parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TUTORIAL = sorted((DOCS / "tutorial").glob("*.md"))
HOWTO = sorted((DOCS / "howto").glob("*.py"))
EVERY_PAGE = [page for page in sorted(DOCS.rglob("*.md")) if not {"_build", "notebooks"} & set(page.parts)]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
each_tutorial = pytest.mark.parametrize("page", TUTORIAL, ids=lambda page: page.stem)
each_howto = pytest.mark.parametrize("program", HOWTO, ids=lambda program: program.stem)


def blocks(page):
    """Returns the kind and the text of each Python block of a page."""
    return re.findall(r"```python ?([a-z]*)\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.fixture
def in_a_new_directory(tmp_path, monkeypatch):
    """Changes to an empty directory, and uses JAX's default type promotion."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@each_page
def test_code_blocks_of_a_page_run(page, in_a_new_directory, capsys, checked_first, compile_fast):
    names = {}
    assert {kind for kind, _ in blocks(page)} <= {"", "continued", "program"}
    for kind, text in blocks(page):
        if kind != "program":
            names = names if kind else {"__name__": "__main__"}
            exec(text, names)
    assert capsys.readouterr().out or not blocks(page)


@each_page
def test_programs_of_a_page_run_in_one_and_two_processes(page, tmp_path):
    for number, text in enumerate(text for kind, text in blocks(page) if kind == "program"):
        program = tmp_path / f"program_{number}.py"
        program.write_text(text)
        for processes in (1, 2):
            job, _ = launch(program, tmp_path / f"run_{number}_{processes}", processes=processes, devices=2)
            assert job.returncode == 0 and "200/200" in job.stdout, job.stdout


@each_tutorial
def test_a_page_of_the_tutorial_prints_what_it_shows(page, in_a_new_directory, capsys, checked_first):
    """Runs the page's program (page 4 uses that of page 3), and then its code blocks."""
    number = {"4": "3"}.get(page.stem[0], page.stem[0])
    names = {"__name__": "__main__"}
    exec((page.parent / f"digits_{number}.py").read_text(), names)
    shown = outputs(page)
    if shown:
        printed = capsys.readouterr().out.splitlines()
        (expected,) = shown
        assert_prints("\n".join(printed[-len(expected.splitlines()) :]), expected)
    for _, text in blocks(page):
        exec(text, names)


@each_tutorial
def test_a_page_of_the_tutorial_is_short_and_has_a_picture(page):
    assert len(page.read_text().split()) < 900
    assert re.search(r"!\[.+\]\(\.\./pictures/\w+\.svg\)", page.read_text())


@each_howto
def test_a_how_to_prints_what_its_page_shows(program, in_a_new_directory, capsys, checked_first):
    names = {"__name__": "__main__"}
    exec(compile(program.read_text(), program, "exec"), names)
    (shown,) = outputs(program.with_suffix(".md"))
    assert_prints(capsys.readouterr().out, shown)


@pytest.mark.parametrize("program", [*HOWTO, *RECIPES], ids=lambda program: program.stem)
def test_a_program_is_short_and_included_in_its_page(program):
    source, page = program.read_text(), program.with_suffix(".md").read_text()
    assert len(source.splitlines()) < (60 if program in HOWTO else 100)
    assert ast.get_docstring(ast.parse(source))
    assert f"```{{literalinclude}} {program.name}\n" in page
    index = (program.parent / "index.md").read_text()
    assert f"[{page.splitlines()[0].removeprefix('# ')}]({program.stem}.md)" in index


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(DOCS).with_suffix("")))
def test_files_and_flags_that_a_page_names_are_there(page):
    text = page.read_text()
    for path in re.findall(r"`((?:jaxloop|tests|docs|colabs|benchmarks)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (jaxloop[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for link in re.findall(r"\]\(([\w./]+\.(?:md|py|ipynb|svg|png))[#)]", text):
        assert (page.parent / link).exists(), link


def test_quoted_code_is_in_the_package():
    pages = [(DOCS / name).read_text() for name in ("inside.md", "howto/run_on_a_cluster.md")]
    excerpts = re.findall(r"```py\n# (\S+)\n(.*?)```", "\n".join(pages), flags=re.DOTALL)
    assert len(excerpts) >= 3
    for path, text in excerpts:
        lines = iter([line.strip() for line in (PACKAGE.parent / path).read_text().splitlines()])
        for line in map(str.strip, text.splitlines()):
            assert line == "..." or line in lines, f"{path} has no such line after those before it: {line}"


def test_the_bars_show_the_figures_of_the_benchmarks():
    """The ratios on the page and in its picture are among the measured ones, rounded."""
    measured = [float(ratio) for ratio in re.findall(r"\d\.\d\d\d", (ROOT / "BENCHMARKS.md").read_text())]
    rows = re.findall(r"^\| .* \((?:59|132) us\) \|(.*)$", (DOCS / "project/benchmarks.md").read_text(), re.MULTILINE)
    picture = (DOCS / "pictures/bars.svg").read_text()
    shown = re.findall(r"\d\.\d\d", " ".join(rows)) + re.findall(r">(\d\.\d\d)<", picture)
    assert len(shown) == 14
    for each in shown:
        assert any(abs(ratio - float(each)) <= 0.0051 for ratio in measured) or each == "1.00", each


def test_nothing_is_cut_off_in_a_picture():
    """Rectangles and texts lie within their picture. The width of a text is a rough lower bound."""
    for path in sorted((DOCS / "pictures").glob("*.svg")):
        picture = ElementTree.parse(path).getroot()
        limit = float(picture.attrib["viewBox"].split()[2])
        for each in picture.iter("{http://www.w3.org/2000/svg}rect"):
            assert 0 <= float(each.get("x", 0)) <= limit - float(each.get("width", 0)), (path.name, each.attrib)
        for each in picture.iter("{http://www.w3.org/2000/svg}text"):
            text = "".join(each.itertext())
            width, place = 0.4 * len(text) * float(each.get("font-size", 13)), float(each.get("x", 0))
            left = place - width * {"start": 0, "middle": 0.5, "end": 1}[each.get("text-anchor", "start")]
            assert 0 <= left <= limit - width, (path.name, text)


def test_the_documentation_is_short():
    """Counts the words outside of code blocks."""
    texts = [page.read_text() for page in [ROOT / "README.md", *EVERY_PAGE]]
    assert sum(len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) for text in texts) <= 30_000
    assert len((DOCS / "inside.md").read_text().splitlines()) <= 250
