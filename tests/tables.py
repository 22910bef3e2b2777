"""The tables of the documentation that are made from the code: ``python -m tests.tables write`` (or
``check``).

A table is in a page of docs/ between a line ``<!-- table NAME -->`` and the next line ``<!-- end
-->``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.core import errors
from recipes.core.config import help
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.run_keys import RunKeys, TrainKeys
from recipes.core.doctor import patterns

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        head,
        ["---"] * len(head),
        *([cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(value: Any) -> str:
    """A default, as it is typed; "" for a text or a number that has none."""
    return f"`{help.typed(value)}`" if help.typed(value) else ""


def keys(cls: type, more: str = "", beside: type | None = None) -> str:
    """The keys of a dataclass. more: a further column, from each field's metadata. beside: without
    the keys that are the same there.
    """
    others = (
        {f.name: (f.default, f.metadata["help"]) for f in dataclasses.fields(beside)}
        if beside
        else {}
    )
    rows = []
    for field in dataclasses.fields(cls):
        if others.get(field.name) != (field.default, field.metadata["help"]):
            last = [field.metadata[more]] if more else []
            rows.append([f"`{field.name}=`", shown(field.default), field.metadata["help"], *last])
    return table(["key", "default", "meaning", *(["option of sbatch"] if more else [])], rows)


def differences(of: Mapping[str, Mapping[str, Any]], name: str) -> str:
    words = {
        variant: " ".join(f"`{key}={help.typed(value)}`" for key, value in of[variant].items())
        for variant in of
    }
    return table([name, "sets"], [[f"`{variant}`", text] for variant, text in words.items()])


def commented(source: str, pattern: str) -> list[list[str]]:
    """The lines of a source that match, by a name and a value, each with the comment above it or
    at its end; without one, the name in words.
    """
    rows = []
    for above, name, value, behind in re.findall(
        rf"^((?: *# .*\n)*) *{pattern}(?: +# (.*))?$", source, re.MULTILINE
    ):
        comment = behind or " ".join(above.replace("#", " ").split())
        rows.append([f"`{value}`", comment or name.lower().replace("_", " ")])
    return rows


def tables() -> Iterator[tuple[str, str]]:
    yield "job-keys", keys(JobKeys, more="instead")
    yield "run-keys", keys(RunKeys)
    yield "training-keys", keys(TrainKeys)
    for recipe in sorted(path.stem for path in (ROOT / "recipes/conf").glob("[a-z]*.py")):
        conf = importlib.import_module(f"recipes.conf.{recipe}")
        yield (
            recipe,
            keys(conf.Config, beside=TrainKeys if issubclass(conf.Config, TrainKeys) else None),
        )
        for name in ("VARIANTS", "DATASETS"):
            variants = getattr(conf, name, {})
            if variants:
                yield (
                    f"{recipe}-{name.lower()}",
                    differences(variants, f"`{name.lower().removesuffix('s')}=`"),
                )
    yield (
        "exit-statuses",
        table(["status", "meaning"], commented(inspect.getsource(errors), r"EXIT_(\w+) = (\d+)")),
    )
    texts = (
        [
            ", ".join(
                f"`` {text.strip()} ``" if "`" in text else f"`{text.strip()}`"
                for text in p.texts.split(" | ")
            ),
            p.means,
            p.fix,
        ]
        for p in patterns.PATTERNS
    )
    yield "faq", table(["message", "what it means", "what to do"], [*texts])
    for name, kinds in (("kinds", errors.Kind), ("nexts", errors.Next)):
        yield (
            name,
            table(
                [f"`{name[:-1]}`", "meaning"],
                commented(inspect.getsource(kinds), r'(\w+) = "([\w-]+)"'),
            ),
        )


def main(argv: list[str], folder: Path = ROOT / "docs") -> int:
    """write: makes the tables. check: status 1 if a table differs from what would be made. Both
    name the tables that are on no page.
    """
    if argv not in (["write"], ["check"]):
        print("usage: python -m tests.tables write|check", file=sys.stderr)
        return 2
    made = dict(tables())
    said = []
    is_check = argv == ["check"]
    missing = set(made)
    for page in sorted(folder.glob("*.md")):
        text = page.read_text()
        for _, name, old, _ in MARKED.findall(text):
            missing.discard(name)
            if made.get(name) != old:
                said.append(
                    f"{page.name}: table {name}: "
                    f"{'differs from the code: make docs' if is_check else 'made'}"
                )
        if not is_check:
            page.write_text(
                MARKED.sub(lambda match: match[1] + made.get(match[2], match[3]) + match[4], text)
            )
    said += [f"table {name}: is on no page" for name in sorted(missing)]
    print(
        "".join(f"{line}\n" for line in said), end="", file=sys.stderr if is_check else sys.stdout
    )
    return 1 if is_check and said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
