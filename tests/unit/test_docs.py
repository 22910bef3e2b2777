"""The documentation: its tables are those of the code, its links lead somewhere, and what it shows
beside commands works.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import helpers, tables
from tests.helpers import ROOT
from tests.slurm import readme

LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = (*readme.PAGES, ROOT / "CHANGELOG.md")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def test_tables_are_checked_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["check"]) == 0, capsys.readouterr().err
    folder = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    text = (folder / "keys.md").read_text()
    assert "| `epochs=` | `90` |" in text
    (folder / "keys.md").write_text(text.replace("| `epochs=` | `90` |", "| `epochs=` | `91` |"))
    assert tables.main(["check"], folder) == 1
    assert "keys.md: table imagenet" in capsys.readouterr().err
    assert tables.main(["write"], folder) == 0
    assert (folder / "keys.md").read_text() == text
    (folder / "run-directory.md").unlink()
    assert tables.main(["check"], folder) == 1
    assert "table kinds: is on no page" in capsys.readouterr().err


def test_links_lead_somewhere() -> None:
    links = [
        (page, link)
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if "://" not in link
    ]
    assert len(links) > 40
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_files_that_are_named_exist() -> None:
    named = [
        (page, name)
        for page in PAGES
        for name in re.findall(r"`([a-z_/]+\.(?:py|sh))`", page.read_text())
    ]
    assert len(named) > 20
    places = [ROOT, ROOT / "recipes", *(ROOT / "recipes/core").glob("**/")]
    written = {"job.sh", *readme.shown_files()}  # job.sh: in a run directory
    others = [(page.name, name) for page, name in named if name not in written]
    assert [
        other for other in others if not any((place / other[1]).exists() for place in places)
    ] == []


def test_the_front_page_and_each_page_for_a_task() -> None:
    front = (ROOT / "README.md").read_text()
    assert len(front.splitlines()) < 130
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) > 10
    for page in pages:
        assert f"](docs/{page.name})" in front
        assert re.match(r"# .+\n\n```sh\n", page.read_text()), (
            f"{page.name} does not open with a command"
        )


def test_the_keys_of_the_skeleton_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole skeleton runs in tests/slurm/test_readme.py."""
    shown = readme.files((ROOT / "docs/new-recipe.md").read_text())
    assert set(shown) == {
        f"recipes/{name}.py" for name in ("conf/rings", "rings", "conf/words", "words")
    }
    module = ModuleType("rings")
    monkeypatch.setitem(sys.modules, "rings", module)  # dataclasses look there
    exec(shown["recipes/conf/rings.py"], vars(module))
    assert module.Config().hidden == 64
    assert module.Config().epochs == 10


def test_the_scripts_become_the_recipe_beside_them() -> None:
    """The lines before and after are those of the whole files."""
    page = (ROOT / "docs/your-script.md").read_text()
    shown = readme.files(page)
    single, ddp = readme.differences(page)
    assert single[1] == ddp[1]
    for name, (before, _) in (("single.py", single), ("ddp.py", ddp)):
        words = [line.strip() for line in shown[name].splitlines()[1:]]
        assert [line.strip() for line in before.splitlines()] == words, name
    for number in range(1, 9):
        assert single[1].count(f"  # {number}\n") == page.count(f"\n{number}. ") == 1


@pytest.mark.long
def test_a_run_has_the_files_that_are_listed_and_the_notebook_reads_it(tmp_path: Path) -> None:
    page = (ROOT / "docs/run-directory.md").read_text()
    words = [
        "-m",
        "recipes.mnist",
        "dataset=digits",
        "device=cpu",
        "max_steps=2",
        f"run_dir={tmp_path}/runs/demo",
    ]
    ended = helpers.run([sys.executable, *words]).expect(0)
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    for path in (tmp_path / "runs/demo").iterdir():
        assert path.name + "/" * path.is_dir() in listed
    for name in ("status", "summary"):
        assert [
            key for key in helpers.read(tmp_path / "runs/demo", name) if f"`{key}`" not in page
        ] == []
    [notebook] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    environ = helpers.clean_environment(PYTHONPATH=str(ROOT))
    ended = helpers.run([sys.executable, "-c", notebook], cwd=tmp_path, environ=environ).expect(0)
    assert ended.lines[-1].split(" ")[:2] == ["step-00000002.pt", "2"]
