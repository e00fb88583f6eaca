"""Whatever the documentation shows works: its code runs, its commands parse, its reference is whole.

Fenced `python` blocks of a page are executed one after the other, in one namespace and in an empty directory; stores in
URLs become directories there. In `sh` blocks every `pulse-rl` command is parsed by the command line itself, and `make`
targets, scripts and extras must exist. Other blocks are output. HTML comments, which no reader sees, say more:

    <!-- setup … -->              Python that the page needs and does not show
    <!-- run -->                  run the commands of the next `sh` block, too
    <!-- not run: the reason -->  only compile the next `python` block
"""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
from typer.testing import CliRunner

from pulse_rl.cli.app import app
from tests import ROOT, links, reference

PAGES = [*ROOT.glob("*.md"), ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = 15  # blocks of Python that only compile; each says why

_PART = re.compile(r"<!-- (.*?) ?-->\n|^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S.*\n(?:\n?(?= {4}))?)+")
_STORE = re.compile(r"""(["'])(?:s3|gs|az|file|https)://([^"']+)\1""")
_SHELL_URL = re.compile(r"(?:s3|gs|az|file|https)://([\w./-]+)")


class Block(NamedTuple):
    """One piece of code of a page."""

    language: str  # "" for an indented one
    text: str
    line: int
    note: str  # of the comment before it


def blocks(page: Path) -> list[Block]:
    """The code of a page, in order; hidden setup counts as Python."""
    text = page.read_text()
    found, note = [], ""
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part[1] is not None:
            if part[1].startswith("setup\n"):
                found.append(Block("python", part[1].removeprefix("setup"), line, ""))
            note = part[1]
            continue
        code = re.sub(rf"(?m)^{part[2]}", "", part[4])
        found.append(Block(part[3], code, line, note))
        note = ""
    plain = _PART.sub(lambda part: "\n" * part[0].count("\n"), text)
    found += [Block("", part[0], plain.count("\n", 0, part.start()) + 1, "") for part in _INDENTED.finditer(plain)]
    return sorted(found, key=lambda block: block.line)


def python(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", [page for page in PAGES if python(page)], ids=page_id)
def test_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of Python, in the order of the page; commands that are marked so run where they stand."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    try:
        for block in blocks(page):
            if block.language == "python":
                code = _STORE.sub(lambda url: repr(str(tmp_path / url[2])), block.text)
                # Empty lines before it, so that a traceback names the page's own line.
                compiled = compile("\n" * block.line + code, page_id(page), "exec")
                if not block.note.startswith("not run: "):
                    exec(compiled, namespace)
            elif block.note == "run":
                for words in commands(block.text):
                    assert words[0] == "pulse-rl", f"{page_id(page)}:{block.line} can only run pulse-rl"
                    given = [_SHELL_URL.sub(lambda url: str(tmp_path / url[1]), word) for word in words[1:]]
                    done = CliRunner().invoke(app, given)
                    assert done.exit_code == 0, f"{page_id(page)}:{block.line}: {done.output}"
    finally:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()


def test_what_is_not_run_says_why() -> None:
    """A block that only compiles is an exception, and there are few of them."""
    notes = [block.note for page in PAGES for block in python(page) if block.note.startswith("not run")]
    assert all(re.fullmatch(r"not run: .{10,}", note) for note in notes)
    assert len(notes) == NOT_RUN


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a piece of shell, with the first value of every loop's variable."""
    text = text.replace("\\\n", " ")
    values = dict(re.findall(r"for (\w+) in ([^\s;]+)", text))
    values |= dict(re.findall(r"(?m)^(\w+)=(\S+)$", text))
    text = re.sub(r"\$\(\(.*?\)\)", "1", text)
    text = re.sub(r"\$(\w+)", lambda name: values.get(name[1], name[0]), text)
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in {";", "&&", "||", "|", "<", ">", "do", "done", "then", "fi"}:
                if words and "=" not in words[0] and words[0] not in {"for"}:
                    yield [words[0].removeprefix("$ ").removeprefix(".venv/bin/"), *words[1:]]
                words = []
            else:
                words.append(word)


def shell() -> Iterator[tuple[Path, Block]]:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh" or (
                not block.language and re.search(r"(?m)^ *(\.venv/bin/)?pulse-rl ", block.text)
            ):
                yield page, block


def parse(words: list[str]) -> None:
    """Parse one command as the command line does; raises its usage errors."""
    command = typer.main.get_command(app)
    context = command.make_context("pulse-rl", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize(
    ("page", "block"), list(shell()), ids=lambda at: page_id(at) if isinstance(at, Path) else at.line
)
def test_shell(page: Path, block: Block) -> None:
    """Commands of ours parse; what else is named exists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(block.text):
        if words[0] == "pulse-rl":
            parse(words[1:])
        elif words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"(?m)^{target}:", makefile) for target in targets), words
        elif words[0] in ("python", "pytest") and len(words) > 1 and not words[1].startswith("-"):
            assert (ROOT / words[1]).exists(), words
        for extra in re.findall(r"\[([a-z,]+)\]", " ".join(words)) if words[0] == "pip" else []:
            assert set(extra.split(",")) <= set(project["optional-dependencies"]), words


def test_the_page_of_the_command_line_names_every_command() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    group = typer.main.get_command(app)
    names = set()
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        names |= {f"{name} {inner}" for inner in getattr(command, "commands", {})} or {name}
    assert set(re.findall(r"(?m)^#+ `?pulse-rl ([a-z -]+?)`?$", text)) == names


def test_the_reference_is_whole() -> None:
    """Every public name has a docstring in the one shape, and a page that shows it."""
    assert reference.problems() == []


def test_the_reference_finds_what_is_missing() -> None:
    class Undocumented:
        pass

    def half(one: int, other: int) -> int:
        """Add.

        Args:
            one: A number.
        """
        return one + other

    def whole(one: int) -> int:
        """Return it.

        Args:
            one: A number.

        Returns:
            The same.
        """
        return one

    Undocumented.__doc__ = None
    assert list(reference.wrong("x", Undocumented)) == ["x: no docstring"]
    assert list(reference.wrong("half", half)) == ["half: says nothing of other", "half: no section Returns"]
    assert list(reference.wrong("whole", whole)) == []


def test_the_reference_shows_defaults_as_values() -> None:
    """By the extension that zensical.toml names: of a constant's name, of a module's attribute, of a literal."""
    griffe = pytest.importorskip("griffe", reason="needs the extra docs")
    from tests.signatures import Values

    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    options = site["plugins"]["mkdocstrings"]["handlers"]["python"]["options"]
    assert options["extensions"] == ["tests/signatures.py"]
    for module, name, expected in (
        ("pulse_rl.sync.publish.publisher", "Publisher.__init__", {"grace": "3600.0", "patience": "60.0"}),
        ("pulse_rl.history.operate.status", "status", {"expire": "86400.0"}),
        ("pulse_rl.store.opening", "open_store", {"cache_nbytes": "8_589_934_592", "cache": "False"}),
    ):
        file = ROOT / "src" / f"{module.replace('.', '/')}.py"
        function = griffe.visit(module, filepath=file, code=file.read_text())[name]
        Values().on_function(func=function)
        assert {one.name: str(one.default) for one in function.parameters if one.name in expected} == expected


def test_the_navigation_has_five_groups_with_every_page() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inner in entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ():
            yield from pages(inner)

    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert [next(iter(group)) for group in nav] == ["Start", "Guides", "Concepts", "Operate", "Reference"]
    listed = list(pages(nav))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    assert listed[0] == "index.md"


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`([\w/]+\.(?:py|md|html|toml))`", text):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "src" / "pulse_rl")), name


NOUN = "form.noun"  # in the code: what a kind of sealed object is called


def _messages() -> list[str]:
    """Every text in the code, with "…" where something is filled in, and neighbouring pieces joined.

    What a sealed object is called is filled in: its text is there once for each kind.
    """
    found, nouns = list[str](), list[str]()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(map(_part, node.values)))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "SealedFormat" and len(node.args) > 3:
                nouns.append(str(ast.literal_eval(node.args[3])))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [text.replace(NOUN, noun) for text in found for noun in (nouns if NOUN in text else [NOUN])]


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return NOUN if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) in (NOUN, "noun") else "…"


def test_messages_that_the_docs_explain_are_in_the_code() -> None:
    """Each message of docs/troubleshooting.md: the words between its "…" stand, in order, in one text of the code."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    texts = _messages()
    foreign = {"HTTP error: builder error", "modified by an inplace operation"}  # obstore's, PyTorch's
    for message in re.findall(r"(?m)^`([^`]+)`\n:   ", page):
        pattern = re.compile(".*".join(map(re.escape, filter(None, re.split(r" ?… ?", message)))), re.DOTALL)
        assert message in foreign or any(pattern.search(text) for text in texts), message


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there"> <a href="b.html#gone"> <a href="c.html"> <a href="#x">')
    (tmp_path / "b.html").write_text(
        '<p id="there">, <img src="https://elsewhere/x.png">, <a href="https://elsewhere">'
    )
    assert list(links.wrong(tmp_path)) == [
        "a.html: b.html#gone has no such place",
        "a.html: c.html leads nowhere",
        "a.html: #x has no such place",
        "b.html: https://elsewhere/x.png is loaded from another place",
    ]
