"""Text as token ids: what `prepare text` writes and keeps, and which tokens a sequence has."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from recipes import prepare
from recipes.core.data import documents, sentences, text
from recipes.core.data.sampling import GlobalBatches
from recipes.core.data.text import Text
from recipes.core.errors import InputError
from recipes.core.launch import checks
from recipes.core.run import command_line
from tests import helpers
from tests.helpers import ROOT
from tests.unit.data import common as data_common

END = 256
Prepare = Callable[..., tuple[int, str]]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Prepare:
    """Prepares tmp_path/source in threads; exit status, and stdout or the one line of an error."""
    monkeypatch.setattr(
        documents, "ProcessPoolExecutor", lambda count, *rest: ThreadPoolExecutor(count)
    )

    def go(*words: str) -> tuple[int, str]:
        status = prepare.main(
            ["text", f"source={tmp_path}/source", f"data_dir={tmp_path}/data", *words]
        )
        out, err = capsys.readouterr()
        assert err.count("\n") == (status != 0)
        return status, err or out

    return go


def put(folder: Path, **contents: str) -> None:
    """Files source/NAME.KIND, given as NAME_KIND."""
    for name, content in contents.items():
        path = folder / "source" / name.replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogateescape"))


def of_parquet(monkeypatch: pytest.MonkeyPatch, *values: object) -> None:
    """pyarrow, whose files have these values in the column text."""
    batches = [SimpleNamespace(to_pylist=lambda: [{"text": value} for value in values])]
    parquet = SimpleNamespace(
        ParquetFile=lambda path, pre_buffer: SimpleNamespace(
            iter_batches=lambda rows, columns: batches
        )
    )
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))


def ids(*documents: str) -> list[int]:
    return [token for document in documents for token in (*document.encode(), END)]


def opened(folder: Path) -> Text:
    """What has been prepared in ``folder``/data."""
    return text.open_text(str(folder / "data"))


def all_tokens(data: Text) -> list[int]:
    return [token for shard in data._shards for token in shard.tolist()]


def test_documents_are_packed_one_after_another(tmp_path: Path, run: Prepare) -> None:
    lines = [json.dumps({"text": document}) for document in ("two\n", "drei ä", "\ud800")]
    put(
        tmp_path,
        a_txt="one<|endoftext|>\nrest\n<|endoftext|>\n",
        b_jsonl="\n".join(lines) + "\n\n",
        c_md="not read",
    )
    status, out = run()
    *_, last = out.splitlines()
    assert last == f"next: python launch.py recipe=gpt data_dir={tmp_path}/data"
    assert status == 0
    data = opened(tmp_path)
    expected = ids("one", "\nrest\n", "two\n", "drei ä", "?")
    assert all_tokens(data) == expected
    index = json.loads((tmp_path / "data/text/index.json").read_text())
    [shard] = index["shards"]
    assert shard["tokens"] == len(expected)
    assert index["dtype"] == "<u2"
    assert data.decode(expected) == "one\nrest\ntwo\ndrei ä?"


def test_other_libraries_tokenizers_and_formats(
    tmp_path: Path, run: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer of 70,000 words, which needs uint32; a column that has a null."""
    words = [f"w{i} ".encode() for i in range(69_999)]
    gpt2 = SimpleNamespace(
        eot_token=69_999,
        n_vocab=70_000,
        token_byte_values=lambda: sorted(words),
        encode_single_token=lambda w: int(w[1:]),
        encode_ordinary=lambda document: [int(word[1:]) for word in document.split()],
    )
    tiktoken = SimpleNamespace(get_encoding={"gpt2": gpt2}.__getitem__)
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)
    of_parquet(monkeypatch, "w1 w65536", None)
    put(tmp_path, a_parquet="", b_txt="w69998 w0")
    assert run("tokenizer=gpt2")[0] == 0
    data = opened(tmp_path)
    assert all_tokens(data) == [1, 65_536, 69_999, 69_998, 0, 69_999]
    assert data.decode(all_tokens(data)) == "w1 w65536 w69998 w0 "
    assert data._shards[0].dtype == "<u4"
    why = f"'{tmp_path}/data/text' was made with another tokenizer: give another data_dir="
    assert run("tokenizer=bytes") == (2, f"error: tokenizer=bytes: {why}\n")


@pytest.mark.parametrize(
    ("contents", "words", "expected"),
    [
        ({}, ("source=",), "source= is missing"),
        ({"a_md": "x"}, (), r"source='.*/source' has no \.txt"),
        (
            {"a_txt": "x"},
            ("source=/data/**/*.txt",),
            r"source='/data/\*\*/\*\.txt': \*\* is not supported: give a folder",
        ),
        (
            {"a_jsonl": '{"text": "x"}\n{"text'},
            (),
            r"a\.jsonl', line 2: JSONDecodeError.*: give UTF-8 text",
        ),
        ({"a_jsonl": '{"body": "x"}'}, (), r"a\.jsonl', line 1: KeyError"),
        (
            {"a_jsonl": f'\n{{"text": "{1000 * "x"}"}}'},
            (),
            r"a\.jsonl', line 2: ValueError: it is longer than 1\.0 kB: give UTF-8 text",
        ),
        (
            {"a_jsonl": '{"text": 1}'},
            (),
            r"a\.jsonl', line 1: TypeError: text is of the type int: give UTF-8 text",
        ),
        ({"a_txt": "\udcff"}, (), r"a\.txt': UnicodeDecodeError"),
        (
            {"a_txt": "x\0y\0"},
            (),
            r"a\.txt': ValueError: it has zero bytes, as UTF-16 has: give UTF-8 text",
        ),
        ({"a_jsonl": "{\0}\0"}, (), r"a\.jsonl', line 1: JSONDecodeError.*: give UTF-8 text"),
        ({"a_parquet": "x"}, (), r"a\.parquet': needs pyarrow: pip install '\.\[text\]'"),
        (
            {"a_txt": "x"},
            ("tokenizer=gpt2",),
            r"tokenizer=gpt2: .*tiktoken.*: pip install '\.\[text\]'",
        ),
        ({"a_txt": "x"}, ("tokenizer=gpt3",), "tokenizer=gpt3: must be one of bytes, gpt2"),
    ],
)
def test_bad_input_is_one_line(
    contents: dict[str, str],
    words: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    run: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents, "LONGEST_LINE", 1000)
    for name in ("tiktoken", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    put(tmp_path, **contents)
    status, line = run(*words)
    assert status == 2
    assert re.search(expected, line)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"caf\xc3\xa9", ids("café")),
        (b"\xef\xbb\xbfx", ids("x")),
        ("\ud800", ids("?")),
        (7, "TypeError: text is of the type int"),
        (["a"], "TypeError: text is of the type list"),
        (0, "TypeError: text is of the type int"),
        (b"\xff", "UnicodeDecodeError"),
        (b"x\0", "ValueError: it has zero bytes"),
    ],
)
def test_a_column_has_strings_or_bytes(
    tmp_path: Path,
    run: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    value: object,
    expected: list[int] | str,
) -> None:
    of_parquet(monkeypatch, None, value, "")
    put(tmp_path, a_parquet="")
    status, line = run()
    if isinstance(expected, str):
        assert status == 2, line
        assert f", line 2: {expected}" in line
    else:
        assert all_tokens(opened(tmp_path)) == expected
        assert status == 0


def test_which_files_of_a_folder_are_read(
    tmp_path: Path, run: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_parquet(monkeypatch, "row")
    source = tmp_path / "source"
    for name in ("a.txt", "B.TXT", "corpus.parquet/part-0.parquet", "more/d.txt"):
        data_common.put(source / name, name[:1].encode())
    data_common.put(source / "c.JSONL", b'{"text": "j"}')
    for name in (
        "._a.txt",
        ".ipynb_checkpoints/a.txt",
        "@eaDir/a.txt",
        "corpus.parquet/.part-0.parquet.crc",
    ):
        data_common.put(source / name, b"\xff")
    for name in ("e.md", "f.json", "g.jsonl.gz", "h.md", "corpus.parquet/_SUCCESS"):
        data_common.put(source / name)
    data_common.put(tmp_path / "elsewhere/l.txt", b"l")
    for name, target in (("link", "../elsewhere"), ("self", "."), ("up", ".."), ("again", "more")):
        (source / name).symlink_to(target)
    status, out = run()
    first, *_ = out.splitlines()
    assert first == f"'{source}': left out: 2 .md, 1 .json, 1 .jsonl.gz, 1 without an ending"
    assert status == 0
    data = opened(tmp_path)
    documents = data.decode(all_tokens(data))
    assert sorted(documents.replace("row", "r")) == sorted("aBjrml")


def test_a_shard_has_about_as_many_bytes_of_source_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "SHARD_BYTES", 10)
    put(tmp_path, a_txt="6bytes", b_txt="6bytes", c_txt="6bytes", d_txt="more than ten", e_txt="")
    groups = documents.find_groups(str(tmp_path / "source"), [".txt"], print)
    names = ["".join(path.stem for path in group) for group in groups]
    assert names == ["a", "bc", "de"]


def test_a_pattern_may_name_folders_of_part_files(
    tmp_path: Path, run: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_parquet(monkeypatch, "row")
    for name in ("a.parquet/part-0.parquet", "b.parquet/part-0.parquet", "c.txt"):
        data_common.put(tmp_path / "source" / name)
    assert run(f"source={tmp_path}/source/*.parquet")[0] == 0
    assert all_tokens(opened(tmp_path)) == ids("row", "row")


def test_the_name_of_a_file_may_look_like_a_pattern(tmp_path: Path, run: Prepare) -> None:
    data_common.put(tmp_path / "source/notes [1].txt", b"one")
    assert run(f"source={tmp_path}/source/notes [1].txt")[0] == 0
    assert all_tokens(opened(tmp_path)) == ids("one")


def test_a_byte_order_mark_is_not_text(tmp_path: Path, run: Prepare) -> None:
    put(tmp_path, a_txt="\ufeffone", b_jsonl='\ufeff{"text": "two"}')
    assert run()[0] == 0
    assert all_tokens(opened(tmp_path)) == ids("one", "two")


def six_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SHARD_BYTES", 1)
    put(tmp_path, **{f"{i}_txt": f"document {i}" for i in range(6)})


KILLED = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from recipes import prepare
from recipes.core import files
from recipes.core.data import documents
documents.ProcessPoolExecutor = lambda count, *rest: ThreadPoolExecutor(count)
documents.SHARD_BYTES, whole = 1, files.write_whole

def write_whole(path, write):
    def part(file):
        write(file)
        if path.name == "00003.bin":
            file.flush(), os.kill(os.getpid(), 9)
    whole(path, part)

files.write_whole = write_whole
prepare.main(["text", "workers=1", *sys.argv[1:]])
"""


def test_a_killed_preparation_continues(
    tmp_path: Path, run: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    six_shards(tmp_path, monkeypatch)
    folder = tmp_path / "data/text"
    words = [f"source={tmp_path}/source", f"data_dir={tmp_path}/data"]
    helpers.run([sys.executable, "-c", KILLED, *words]).expect(-9)
    with pytest.raises(
        InputError, match=r"lacks index\.json .*: python -m recipes\.prepare text data_dir="
    ):
        opened(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    assert [path.name for path in sorted(kept)] == ["00000.bin", "00001.bin", "00002.bin"]
    # it was damaged meanwhile
    (folder / "00001.bin").write_bytes(bytes((folder / "00001.bin").stat().st_size))
    assert run()[0] == 0
    assert [path.name for path in sorted(kept) if path.stat().st_mtime_ns == kept[path]] == [
        "00000.bin",
        "00002.bin",
    ]
    assert all_tokens(opened(tmp_path)) == ids(*(f"document {i}" for i in range(6)))
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_source_that_has_changed_is_read_again(
    tmp_path: Path, run: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    six_shards(tmp_path, monkeypatch)
    run()
    before = opened(tmp_path).digest
    put(tmp_path, **{"2_txt": "document X"})  # of the same size
    assert run()[0] == 0
    data = opened(tmp_path)
    assert ids("document 1", "document X", "document 3") == all_tokens(data)[11:44]
    assert data.digest != before


def test_a_source_that_is_removed_meanwhile_is_named(
    tmp_path: Path, run: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "source/gone.txt"
    monkeypatch.setattr(documents, "find_groups", lambda *_: [[gone]])
    status, line = run()
    assert status == 2
    assert line.startswith(f"error: {str(gone)!r} cannot be read (No such file or directory): run")


def test_a_damaged_text_is_refused(tmp_path: Path, run: Prepare) -> None:
    put(tmp_path, a_txt="some text")
    run()
    folder = tmp_path / "data/text"
    where = str(tmp_path / "data")
    shard = folder / "00000.bin"
    index = folder / "index.json"
    content = shard.read_bytes()
    known = index.read_text()
    shard.write_bytes(b"\x01\x01" + content[2:])
    with pytest.raises(InputError, match="token 257 is not one of the 257"):
        text.open_text(where).take([0], 3)
    shard.write_bytes(content[:-2])
    with pytest.raises(
        InputError,
        match=r"00000\.bin' is not a file of 20 bytes: run python -m recipes\.prepare text",
    ):
        text.open_text(where)
    for damaged in (
        "",
        "[]",
        "{}",
        known.replace('"version": 1', '"version": 2'),
        known.replace("<u2", "O"),
        known.replace('"tokens": 10', '"tokens": "x"'),
    ):
        assert damaged != known
        index.write_text(damaged)
        with pytest.raises(InputError, match=r"index\.json' is damaged, or does not describe text"):
            text.open_text(where)
    # prepare writes into a folder in data_dir=, which is then found first
    renamed = folder.rename(folder.with_name("mine"))
    with pytest.raises(InputError, match=f"data_dir={renamed} source=FOLDER again"):
        text.open_text(str(renamed))


def test_a_dead_worker_leaves_no_complete_text(
    tmp_path: Path, run: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*tasks: object) -> Iterator[object]:
        raise BrokenProcessPool

    put(tmp_path, a_txt="x")
    assert run()[0] == 0
    monkeypatch.setattr(documents, "write_one", broken)
    line = "error: a worker process died, probably for lack of memory: reduce workers=\n"
    assert run() == (3, line)
    # it is not complete until a run has ended well
    assert not (tmp_path / "data/text/index.json").exists()


def test_processes_write_the_same_text(tmp_path: Path) -> None:
    put(tmp_path, a_txt="x", b_txt="y")
    words = ["text", "workers=2", f"source={tmp_path}/source/*.txt", f"data_dir={tmp_path}"]
    code = (
        "import sys; from recipes import prepare; from recipes.core.data import documents; "
        "documents.SHARD_BYTES = 1"
    )
    ended = helpers.run(
        [sys.executable, "-c", f"{code}; sys.exit(prepare.main(sys.argv[1:]))", *words], cwd=ROOT
    ).expect(0)
    assert ended.lines[:2] == ["shard 1 of 2: 2 tokens", "shard 2 of 2: 2 tokens"]
    assert all_tokens(text.open_text(str(tmp_path))) == ids("x", "y")


def cut(tokens: list[int], draw: random.Random) -> Text:
    """A text whose shards are of random sizes, of which some are empty."""
    places = sorted(draw.choices(range(len(tokens) + 1), k=9))
    parts = [tokens[i:j] for i, j in zip([0, *places], [*places, len(tokens)], strict=True)]
    return Text([np.array(part, np.uint32) for part in parts], [b""] * 100_000, 0, "")


@pytest.mark.parametrize("seq_len", [1, 7, 100])
def test_each_token_is_a_target_once(seq_len: int) -> None:
    draw = random.Random(seq_len)
    tokens = draw.sample(range(100_000), 1203)
    data = cut(tokens, draw)
    training, validation = data.split(seq_len)
    seen = []
    for rank in range(3):
        for part in GlobalBatches(len(training), 5, 0, rank, 3).epoch(0):
            sequences = data.take(part.indices.tolist(), seq_len)
            assert sequences.shape == (len(part.indices), seq_len + 1)  # also of no sequence
            seen += sequences[:, 1:].flatten().tolist()
    last = 1 + len(training) * seq_len
    end = last + len(validation) * seq_len
    assert sorted(seen) == sorted(tokens[1:last])
    of_validation = data.take(validation, seq_len)
    assert of_validation[:, 1:].flatten().tolist() == tokens[last:end]
    assert of_validation[:, 0].tolist() == [tokens[i * seq_len] for i in validation]
    assert len(tokens) - end < seq_len


def test_the_share_of_the_validation_set(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Text([np.zeros(100_001, np.uint16)], [b""], 0, "")
    assert data.split(100) == (range(990), range(990, 1000))
    assert data.split(20_000) == (range(4), range(4, 5))
    monkeypatch.setattr(text, "MOST_VALIDATION", 250)
    assert data.split(100) == (range(998), range(998, 1000))
    with pytest.raises(InputError, match=r"seq_len=60000: .* seq_len=, or more text"):
        data.split(60_000)


def test_the_text_that_is_made_in_memory_is_the_same_everywhere() -> None:
    made = sentences.made()
    assert made.digest == "d4e6cd56565fe670e2f018875d25195fbb98feafa8561a8179753cf98f720801"
    in_lines = [ord("\n") if token == END else token for token in all_tokens(made)]
    documents = made.decode(in_lines).splitlines()
    assert len(documents) > 1000
    for document in documents[:100]:
        inner = re.sub(r"[^(){}\[\]]", "", document)
        while inner != (inner := re.sub(r"\(\)|\[\]|\{\}", "", inner)):
            pass
        assert inner == ""
        flat = document
        while flat != (flat := re.sub(r" [({\[][^(){}\[\]]*[)}\]]", "", flat)):
            pass
        verbs = re.findall(r"says the (?:\w+ )?(\w+) (\w+) the", flat)
        assert len(verbs) == 8
        for noun, verb in verbs:
            assert noun.endswith("s") != verb.endswith("s")


@pytest.mark.parametrize(("recipe", "dataset"), [("gpt", "text"), ("llm", "dialogues")])
def test_a_job_without_its_text_is_not_submitted(tmp_path: Path, recipe: str, dataset: str) -> None:
    settings = command_line.parse([f"recipe={recipe}", f"data_dir={tmp_path}"], environ={})
    lacking = rf"lacks index\.json .*python -m recipes\.prepare {dataset}"
    with pytest.raises(InputError, match=lacking):
        checks.find_data(settings, ROOT)


def test_a_prompt_becomes_the_tokens_of_the_byte_pair_merges() -> None:
    """The pair with the lowest number is merged first, as in tiktoken: "he" before "th"."""
    words = [bytes([i]) for i in range(256)] + [b"he", b"th", b"the", b" t", b" the", b""]
    tokens = text.Text([], words, 261, "").encode("the the tã")
    assert tokens == [258, 260, 259, *"ã".encode()]
    assert text.Text([], words, 261, "").encode("") == []
