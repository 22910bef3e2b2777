"""Dialogues: which tokens the loss counts, what `prepare dialogues` writes, keeps and refuses."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipes import prepare
from recipes.core import files
from recipes.core.data import chat, dialogues, documents, made_dialogues, text
from recipes.core.data.chat import Encoder
from recipes.core.data.dialogues import Examples
from recipes.core.errors import InputError
from tests.unit.data import models
from tests.unit.data.models import CHATML, INST, TAGGED, put_rows

# It is not imported here: every worker imports this file.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is optional: pip install '.[llm]'",
)

Prepare = Callable[..., tuple[int, str]]

USER = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM = {"role": "system", "content": "You are helpful."}
ANSWER = {"role": "assistant", "content": "It is sunny – 20 °C ☀️."}
THANKS = {"role": "user", "content": "Thanks"}
WELCOME = {"role": "assistant", "content": "Any time!"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}],
}
RESULT = {"role": "tool", "content": "sunny"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
DIALOGUE = {"messages": [USER, ANSWER]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make(tmp_path_factory.mktemp("model"))


def test_a_chat_template_has_no_path_as_its_name(tmp_path: Path, model: Path) -> None:
    """save_pretrained of transformers before 5.12 writes a file of this name."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    settings = files.read_json(path) or {}
    for name in ("tool_use", "/home/me/chat_template"):
        templates = [{"name": "default", "template": "x"}, {"name": name, "template": "y"}]
        files.write_json(path, {**settings, "chat_template": templates})
        if name == "tool_use":
            assert chat.open_tokenizer(str(folder)).chat_template[name] == "y"
    with pytest.raises(InputError, match="has the name /home/me/chat_template: give it"):
        chat.open_tokenizer(str(folder))


def test_a_tokenizer_whose_library_panics_is_one_line(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    path = folder / "tokenizer.json"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    files.write_json(path, {**files.read_json(path), "normalizer": normalizer})
    with pytest.raises(InputError, match="give the folder of a Hugging Face model"):
        chat.open_tokenizer(str(folder))


def test_opening_a_tokenizer_prints_no_warning(model: Path) -> None:
    """As transformers has of each model whose code it does not have."""
    logging = importlib.import_module("transformers").logging
    logging.set_verbosity_warning()
    chat.open_tokenizer(str(model))
    assert logging.get_verbosity() == logging.ERROR


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", ["vocab", "vocab_file", "init_inputs"])
def test_a_tokenizer_reads_no_file_elsewhere(tmp_path: Path, file: str, key: str) -> None:
    """The run keeps copies of its tokens. transformers 5.24 opens some of these files."""
    secret = tmp_path / "secret"
    secret.write_text("mine\n[UNK]\n[PAD]\n[CLS]\n[SEP]\n[MASK]\n")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    settings = {"tokenizer_class": "BertTokenizer"}
    files.write_json(tmp_path / "tokenizer_config.json", settings)
    value = [str(secret)] if key == "init_inputs" else str(secret)
    files.write_json(tmp_path / file, {**settings, key: value})
    assert "mine" not in chat.open_tokenizer(str(tmp_path)).get_vocab()


@pytest.fixture
def run(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Prepare:
    """Prepares tmp_path/source in a thread; exit status, and stdout or the one line of an error."""
    monkeypatch.setattr(documents, "ProcessPoolExecutor", lambda *rest: ThreadPoolExecutor(1))

    def go(*words: str) -> tuple[int, str]:
        of_all = [f"source={tmp_path}/source", f"data_dir={tmp_path}/data", f"model={model}"]
        status = prepare.main(["dialogues", *of_all, "val_fraction=0.5", *words])
        out, err = capsys.readouterr()
        assert err.count("\n") == (status != 0)
        return status, err or out

    return go


def opened(folder: Path) -> tuple[Examples, Examples]:
    return dialogues.open_dialogues(str(folder / "data"))


def texts(model: Path, *parts: Examples) -> list[tuple[str, str]]:
    """The text of each example, and of its counted tokens."""
    tokenizer = chat.open_tokenizer(str(model))
    pairs = [part.take(i) for part in parts for i in range(len(part))]
    return sorted((tokenizer.decode(t), tokenizer.decode(t[counted])) for t, counted in pairs)


def encoder(folder: Path, kind: str = "messages", train_on: str = "completion") -> Encoder:
    tokenizer = chat.open_tokenizer(str(folder))
    return Encoder(tokenizer, dialogues.facts_of(str(folder), tokenizer, kind, train_on))


# Each dialogue as the parts of its text. The loss counts those in brackets.
CHATML_TOOLS = [
    '<|im_start|>system\nYou are helpful.\n{"type": "function", "function": '
    '{"name": "weather", "parameters": {}}}<|im_end|>\n'
    "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\n",
    ['<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call><|im_end|>'],
    "\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n",
    ["It is sunny – 20 °C ☀️.<|im_end|>"],
    "\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n",
    ["Any time!<|im_end|>"],
    "\n",
]
TAGGED_TOOLS = [
    '<s>tools:[{"type": "function", "function": {"name": "weather", "parameters": {}}}]'
    "<|head|>system<|/head|>\n\nYou are helpful.<|eot|>"
    "<|head|>user<|/head|>\n\nWhat is the weather in Paris?<|eot|><|head|>assistant<|/head|>\n\n",
    ['[{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]<|eot|>'],
    "<|head|>tool<|/head|>\n\nsunny<|eot|><|head|>assistant<|/head|>\n\n",
    ["It is sunny – 20 °C ☀️.<|eot|>"],
    "<|head|>user<|/head|>\n\nThanks<|eot|><|head|>assistant<|/head|>\n\n",
    ["Any time!<|eot|>"],
]
INST_TURNS = [
    "<s>[INST]You are helpful.\n\nWhat is the weather in Paris?[/INST]",
    [" It is sunny – 20 °C ☀️.</s>"],
    "[INST]Thanks[/INST]",
    [" Any time!</s>"],
]
WITH_TOOLS = {"messages": [SYSTEM, USER, CALL, RESULT, ANSWER, THANKS, WELCOME], "tools": [TOOL]}
WITHOUT_TOOLS = {"messages": [SYSTEM, USER, ANSWER, THANKS, WELCOME]}


@pytest.mark.parametrize(
    ("template", "eos", "row", "expected"),
    [
        (CHATML, "<|im_end|>", WITH_TOOLS, CHATML_TOOLS),
        (TAGGED, "<|eot|>", {**WITH_TOOLS, "tools": json.dumps([TOOL])}, TAGGED_TOOLS),
        (INST, "</s>", WITHOUT_TOOLS, INST_TURNS),
    ],
    ids=["chatml", "generation tags", "inst"],
)
def test_the_loss_counts_the_assistants_tokens_and_their_end_only(
    tmp_path: Path, template: str, eos: str, row: object, expected: list[str | list[str]]
) -> None:
    made = encoder(models.make(tmp_path, template, eos))
    [(tokens, counted, is_ended)] = made.encode(row)
    ids = list[int]()
    targets = list[bool]()
    for part in expected:
        text = part if isinstance(part, str) else part[0]
        more = made.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += more
        targets += [not isinstance(part, str)] * len(more)
    assert tokens.tolist() == ids
    assert counted.tolist() == targets
    assert is_ended

    [everything] = encoder(tmp_path, train_on="all").encode(row)
    assert everything[0].tolist() == ids
    assert everything[1].tolist() == [False] + [True] * (len(ids) - 1)


@pytest.mark.parametrize(
    ("row", "text", "counted"),
    [
        ({"prompt": "1 + 1 =", "completion": " 2"}, "1 + 1 = 2<|im_end|>", " 2<|im_end|>"),
        ({"text": "ab"}, "ab<|im_end|>", "b<|im_end|>"),
        ({"text": "ab<|im_end|>"}, "ab<|im_end|>", "b<|im_end|>"),
        ({"messages": [WELCOME]}, None, "Any time!<|im_end|>"),
    ],
)
def test_other_kinds_of_rows(model: Path, row: dict[str, str], text: str, counted: str) -> None:
    made = encoder(model, chat.kind_of(row))
    [(tokens, targets, is_ended)] = made.encode(row)
    assert made.tokenizer.decode(tokens[targets]) == counted
    if text:
        assert made.tokenizer.decode(tokens) == text
    assert is_ended


# as templates of models that think: an earlier turn has no thoughts
THINKING = CHATML.replace(
    "(message.content or '')",
    "('<think>\\n' if message.role == 'assistant' and loop.last else '') + message.content",
)
PROMPT = CHATML.replace(
    "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>' }}"
)


def test_a_turn_that_changes_once_others_follow_is_learnt_as_it_was(tmp_path: Path) -> None:
    """Each turn is counted once, behind what the model sees when it writes this turn."""
    assert "<think>" in THINKING
    made = encoder(models.make(tmp_path, THINKING))
    pairs = [
        (made.tokenizer.decode(tokens), made.tokenizer.decode(tokens[counted]))
        for tokens, counted, _ in made.encode(WITHOUT_TOOLS)
    ]
    start = "<|im_start|>assistant\n"
    before = (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n"
        f"<|im_start|>user\n{USER['content']}<|im_end|>\n{start}"
    )
    first = f"{ANSWER['content']}<|im_end|>"
    last = f"<think>\n{WELCOME['content']}<|im_end|>"
    assert pairs == [
        (f"{before}<think>\n{first}\n", f"<think>\n{first}"),
        (f"{before}{first}\n<|im_start|>user\nThanks<|im_end|>\n{start}{last}\n", last),
    ]


def test_examples_of_a_row_are_not_in_both_parts(tmp_path: Path, run: Prepare) -> None:
    folder = models.make(tmp_path / "model", THINKING)
    put_rows(tmp_path / "source/a.jsonl", *[WITHOUT_TOOLS] * 9)
    assert run(f"model={folder}", "val_fraction=0.3")[0] == 0
    training, validation = opened(tmp_path)
    assert (len(training), len(validation)) == (12, 6)
    rows = [set(part.places[:, 4].tolist()) for part in (training, validation)]
    assert not rows[0] & rows[1]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{"messages": []}], "line 2: is empty"),
        ([{"messages": [USER, {**ANSWER, "content": " "}]}], "line 2: is empty"),
        ([{"messages": [USER]}], "line 2: has no assistant's turn"),
        (
            [{"messages": [{**USER, "content": [{"type": "text"}]}]}],
            "line 2: has content that",
        ),
        ([{"messages": [{"content": "x"}]}], "line 2: has content .*no role"),
        ([{"messages": "Hello"}], "line 2: has content that is not a string"),
        (
            [{"messages": [USER, {**ANSWER, "content": "x" * 99}]}],
            r"line 2 \(\d+ tokens\): has more",
        ),
        ([{"text": "x"}], "line 2: is of another kind than the first row .*: give messages, or"),
        (["[]"], "line 2: is of another kind"),
        ([{"messages": [USER, {**ANSWER, "content": "\ud800"}]}], "line 2 .*: the chat template"),
        (["{"], "line 2: JSONDecodeError.*: give UTF-8 text; each line of a .jsonl"),
        ([{"messages": [USER]}] * 9, r"line 6: has no assistant's turn \(9 rows\): add a message"),
    ],
)
def test_a_bad_row_is_one_line(tmp_path: Path, run: Prepare, rows: list[object], line: str) -> None:
    put_rows(tmp_path / "source/a.jsonl", DIALOGUE, *rows, DIALOGUE, DIALOGUE)
    status, out = run("max_len=99")
    assert status == 2
    assert re.search(rf"^error: '.*/source/a.jsonl', .*{line}", out)
    if "JSON" in line:
        return

    assert out.endswith("or give too_long=drop or too_long=cut\n")
    status, out = run("max_len=99", "too_long=drop")
    assert status == 0
    assert re.search(rf"left out: .*{line}", out)
    assert sum(map(len, opened(tmp_path))) == 3


CALLS_LEFT_OUT = CHATML.replace("message.tool_calls", "[]")


@pytest.mark.parametrize(
    ("template", "eos", "row", "line"),
    [
        (None, "<|im_end|>", DIALOGUE, "no chat template: add chat_template.jinja"),
        (CHATML, None, DIALOGUE, "no end token: set eos_token in its tokenizer_config.json"),
        (CHATML, "</s>", DIALOGUE, "is not learnt in 2 of 2 examples: set eos_token in"),
        (INST, "</s>", {"messages": [USER, USER, ANSWER]}, "line 1 .*roles must alternate.*: the"),
        (PROMPT, "<|im_end|>", DIALOGUE, "with its generation prompt .*mark the turns in the t"),
        ("{{ nothing.at.all }}", "</s>", DIALOGUE, r"UndefinedError.*: the chat template fails"),
        ("{% if %}", "</s>", DIALOGUE, r"TemplateSyntaxError.*: the chat template fails"),
        (CALLS_LEFT_OUT, "<|im_end|>", WITH_TOOLS, "line 2: has tool calls, which .*: give a mod"),
    ],
)
def test_a_bad_template_is_one_line(
    tmp_path: Path, run: Prepare, template: str | None, eos: str | None, row: object, line: str
) -> None:
    folder = models.make(tmp_path / "model", template, eos)
    put_rows(tmp_path / "source/a.jsonl", row, row)
    status, out = run(f"model={folder}")
    assert status == 2
    assert re.search(line, out)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["source="], "source= is missing"),
        (["source=tested-versions.txt"], r"has no \.jsonl or \.parquet"),
        (["model="], "model='': is not a folder: give the folder of a Hugging Face model"),
        (["model=/dev"], r"model='/dev': .*: give the folder of a Hugging Face model"),
        (["val_fraction=1"], "2 of 2 examples are held out: give more examples, or another val_fr"),
        (["val=/none"], "val='/none' names no file: give a folder"),
    ],
)
def test_bad_keys_are_one_line(tmp_path: Path, run: Prepare, words: list[str], line: str) -> None:
    put_rows(tmp_path / "source/a.jsonl", DIALOGUE, DIALOGUE)
    status, out = run(*words)
    assert status == 2
    assert re.search(line, out)


def test_the_end_token_may_be_one_of_the_models_settings(tmp_path: Path) -> None:
    """As Gemma's, whose tokenizer names another token."""
    folder = models.make(tmp_path, eos="</s>")
    token = chat.open_tokenizer(str(folder)).convert_tokens_to_ids("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [token, 1]}))
    made = encoder(folder)
    assert made.facts["ends"] == [1, token]
    assert made.facts["pad"] == 1  # it has no pad token
    [(_, _, is_ended)] = made.encode(DIALOGUE)
    assert is_ended
    made.tokenizer.pad_token = "<s>"
    assert dialogues.facts_of(str(folder), made.tokenizer, "text", "all")["pad"] == 0
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert encoder(folder).facts["ends"] == [1, 0]


def test_generation_tags_may_have_more_than_the_end_token_of_each_turn(tmp_path: Path) -> None:
    """As many templates for training have the line break that follows it."""
    more = TAGGED.replace("<|eot|>{% endgeneration %}", "<|eot|>{{ '\\n' }}{% endgeneration %}")
    assert more != TAGGED
    some = TAGGED.replace(
        "<|eot|>{% endgeneration %}",
        "{% if loop.last %}<|eot|>{% endif %}{% endgeneration %}"
        "{% if not loop.last %}<|eot|>{% endif %}",
    )
    for template, expected in ((more, True), (some, False)):
        folder = models.make(tmp_path / str(expected), template, "<|eot|>")
        [(_, _, is_ended)] = encoder(folder).encode(WITHOUT_TOOLS)
        assert is_ended == expected


def test_generation_tags_without_the_end_token_are_refused(tmp_path: Path, run: Prepare) -> None:
    untagged = TAGGED.replace("<|eot|>{% endgeneration %}", "{% endgeneration %}<|eot|>")
    folder = models.make(tmp_path / "model", untagged, "<|eot|>")
    put_rows(tmp_path / "source/a.jsonl", DIALOGUE, DIALOGUE)
    status, out = run(f"model={folder}")
    assert status == 2
    assert re.search("not learnt in 2 of 2 .*{% endgeneration %} must follow this token$", out)


def test_the_faults_of_all_shards_are_counted() -> None:
    none = {fault.name: list[str]() for fault in chat.Fault}
    records = [
        {"examples": 2, "endless": 1, "faults": {**none, "empty": ["a"]}},
        {"examples": 1, "endless": 0, "faults": {**none, "empty": ["b"], "no_turn": ["c"]}},
    ]
    lines = list[str]()
    dialogues.judge(records, "drop", lines.append)
    empty, no_turn, endless = lines
    assert empty == "left out: a; b: is empty (2 rows): remove it"
    assert no_turn.startswith("left out: c: has no assistant's turn (1 rows): ")
    assert endless.startswith("warning: the end token is not learnt in 1 of 3 examples: ")
    with pytest.raises(
        InputError, match=r"^a; b: is empty \(2 rows\): remove it, or give too_long"
    ):
        dialogues.judge(records, "refuse", lines.append)


def test_no_row_of_a_refused_set_is_said_to_be_left_out() -> None:
    faults = {fault.name: ["line 1"] if fault is chat.Fault.empty else [] for fault in chat.Fault}
    lines = list[str]()
    with pytest.raises(InputError):
        dialogues.judge([{"faults": faults}], "refuse", lines.append)
    assert lines == ["cannot be used: line 1: is empty (1 rows): remove it"]


def test_long_rows_are_cut(tmp_path: Path, run: Prepare, model: Path) -> None:
    long = {"messages": [USER, {**ANSWER, "content": "A" + "b" * 200}]}
    late = {"messages": [{**USER, "content": "c" * 200}, ANSWER]}
    put_rows(tmp_path / "source/a.jsonl", DIALOGUE, long, late, DIALOGUE)
    status, out = run("max_len=99", "too_long=cut")
    assert status == 0
    assert re.search(
        r"cut: .*line 2 .*tokens\); .*line 3 .*has more than max_len .*\(2 rows\)", out
    )
    assert re.search(r"left out: .*line 3: has no token to learn in its first max_len tokens", out)
    assert "too_long=cut" not in out
    assert f"next: python launch.py recipe=llm model={model} max_len=99 data_dir=" in out
    parts = opened(tmp_path)
    assert sum(map(len, parts)) == 3
    [(_, counted)] = [pair for pair in texts(model, *parts) if "bbb" in pair[0]]
    assert re.fullmatch("Ab+", counted)
    lengths = np.concatenate([part.lengths for part in parts])
    assert lengths.max() == 99


def test_a_held_out_part_is_drawn_by_the_seed_or_read_from_files(
    tmp_path: Path, run: Prepare, model: Path
) -> None:
    rows = [{"text": f"row {i}"} for i in range(20)]
    put_rows(tmp_path / "source/a.jsonl", *rows[:12])
    put_rows(tmp_path / "source/b.jsonl", *rows[12:])
    put_rows(tmp_path / "source/_empty.jsonl")
    everything = sorted(f"row {i}<|im_end|>" for i in range(20))
    drawn = []
    for seed in (0, 0, 1):
        assert run(f"seed={seed}", "val_fraction=0.1")[0] == 0
        training, validation = opened(tmp_path)
        assert len(validation) == 2
        assert sorted(text for text, _ in texts(model, training, validation)) == everything
        assert training.digest != validation.digest
        drawn.append((texts(model, validation), training.digest))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0]
    assert drawn[0][1] != drawn[2][1]
    assert run("val_fraction=0.001")[0] == 0
    assert len(opened(tmp_path)[1]) == 1

    # a file within source= is not also trained on, by whatever path it is named
    (tmp_path / "link").symlink_to("source")
    for place, source in (("source", "source"), ("link", "source"), ("source", "link/../source")):
        status, out = run(f"val={tmp_path}/{place}/b.jsonl", f"source={tmp_path}/{source}")
        assert status == 0
        _, validation = opened(tmp_path)
        assert [text for text, _ in texts(model, validation)] == sorted(
            f"row {i}<|im_end|>" for i in range(12, 20)
        )
        assert re.search(r"\ntraining: 12 examples, \d+ tokens; .*\nvalidation: 8 examples", out)
    assert f"next: python launch.py recipe=llm model={model} data_dir={tmp_path}/data" in out
    status, out = run(f"val={tmp_path}/source")
    assert status == 2
    assert "has no .jsonl or .parquet besides the files of val=: give a folder" in out


def test_the_next_command_has_the_absolute_path_of_a_model(
    tmp_path: Path,
    run: Prepare,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Recipe llm refuses a relative one. A name on the hub stays."""
    monkeypatch.chdir(model.parent)
    rows = [json.dumps({"text": text}) for text in ("one", "two")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = [f"source={tmp_path}/rows.jsonl", f"data_dir={tmp_path}/data", "val_fraction=0.5"]
    assert prepare.main(["dialogues", *words, f"model=./{model.name}"]) == 0
    assert f"recipe=llm model={model} data_dir=" in capsys.readouterr().out
    monkeypatch.setattr(dialogues, "write", lambda *of: None)
    named = prepare.DialoguesKeys(source="rows.jsonl", model="org/name")
    assert prepare.prepare_dialogues(named, tmp_path / "data") == "llm model=org/name"


def test_shards_that_are_valid_are_kept(tmp_path: Path, run: Prepare) -> None:
    """Also if only what happens to bad rows differs. A damaged one, a changed file, other keys and
    other code make it again.
    """
    for name in ("a", "b"):
        put_rows(tmp_path / f"source/{name}/{name}.jsonl", {"text": name * 3})
    put_rows(tmp_path / "source/c.jsonl", {"text": " \n"})  # its shard has no example
    bins = [tmp_path / f"data/dialogues/{i:05d}.bin" for i in range(3)]

    def made(*words: str) -> list[int]:
        """The shards that a run has written."""
        before = [path.exists() and path.stat().st_mtime_ns for path in bins]
        run(*words)
        after = [path.stat().st_mtime_ns for path in bins]
        return [i for i in range(3) if before[i] != after[i]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "SHARD_BYTES", 1)
        assert made() == [0, 1, 2]
        assert not (tmp_path / "data/dialogues/index.json").exists()
        assert made("too_long=drop") == []
        training, validation = opened(tmp_path)
        assert (len(training), len(validation)) == (1, 1)
        bins[1].write_bytes(bytes(bins[1].stat().st_size))
        assert made("too_long=drop") == [1]
        put_rows(tmp_path / "source/a/a.jsonl", {"text": "xyz"})
        assert made("too_long=drop") == [0]
        assert opened(tmp_path)[0].digest != training.digest
        assert made("too_long=drop", "train_on=all") == [0, 1, 2]
        patch.setattr(documents, "RULES", documents.RULES - 1)  # of earlier code
        assert made("too_long=drop", "train_on=all") == [0, 1, 2]
    bins[0].write_bytes(b"")
    with pytest.raises(
        InputError, match=r"00000\.bin' is not a file of .* bytes: run python -m re"
    ):
        opened(tmp_path)
    index = tmp_path / "data/dialogues/index.json"
    for damaged in ("{}", index.read_text().replace('"examples"', '"example"')):
        index.write_text(damaged)
        with pytest.raises(InputError, match=r"index\.json' is damaged"):
            opened(tmp_path)
    with pytest.raises(InputError, match=r"lacks index\.json .*source=FOLDER model=FOLDER"):
        dialogues.open_dialogues(str(tmp_path))


def test_equal_rows_become_equal_shards(tmp_path: Path) -> None:
    """If this fails, raise documents.RULES, and give both values here: shards of earlier code must
    not be kept.
    """
    tokenizer = made_dialogues.made_tokenizer()
    shards = io.BytesIO()
    rows = {
        "messages": [WITH_TOOLS, WITHOUT_TOOLS, {"messages": []}],
        "prompt": [{"prompt": "1 + 1 =", "completion": " 2"}],
        "text": [{"text": "ab<|im_end|>"}, {"text": "long " * 99}],
    }
    for template in (made_dialogues.TEMPLATE, CHATML):
        tokenizer.chat_template = template
        for kind, of_kind in rows.items():
            facts = dialogues.facts_of("", tokenizer, kind, "completion")
            made = Encoder(tokenizer, {**facts, "max_len": 300, "cut": True})
            dialogues.write_examples(shards, made, [("", row) for row in of_kind])
    path = tmp_path / "a.txt"
    path.write_text("one<|endoftext|>two ☀")
    text.write_documents("bytes", "<u2", shards, [path])
    digest = hashlib.sha256(shards.getvalue()).hexdigest()
    assert (documents.RULES, digest[:16]) == (1, "9f80ebe42a5c1c39")


def test_an_unknown_token_is_refused(tmp_path: Path, run: Prepare) -> None:
    put_rows(tmp_path / "source/a.jsonl", {"text": "abc"}, {"text": "abd"})
    run()
    shard = tmp_path / "data/dialogues/00000.bin"
    shard.write_bytes(b"\xff\xff\xff\x7f" * 2 + shard.read_bytes()[8:])
    with pytest.raises(InputError, match="token 2147483647 is not in the vocabulary: prepare "):
        [part.take(0) for part in opened(tmp_path)]


def test_a_model_may_have_fewer_tokens_than_its_tokenizer(tmp_path: Path, run: Prepare) -> None:
    put_rows(tmp_path / "source/a.jsonl", {"text": "abc"}, {"text": "abd"})
    run()
    examples = opened(tmp_path)[0]
    most = int(examples.take(0)[0].max())
    few = dialogues.limited(examples, most + 1)
    assert few.take(0)[0].tolist() == examples.take(0)[0].tolist()
    assert few.facts["pad"] <= most
    padded = replace(examples, facts={**examples.facts, "pad": 999})
    assert dialogues.limited(padded, 999).facts["pad"] == examples.facts["ends"][0] != 999
    assert dialogues.limited(padded, 1000).facts == padded.facts
    with pytest.raises(InputError, match=f"token {most} is not in the vocabulary: .* give a model"):
        dialogues.limited(examples, most).take(0)


def test_a_token_with_characters_of_prompt_and_completion_is_counted() -> None:
    def tokenizer(text: str, **options: object) -> dict[str, list[object]]:
        return {"input_ids": [1, 2, 3], "offset_mapping": [(0, 1), (1, 3), (3, 4)]}

    tokens, counted = Encoder(tokenizer, {"kind": "prompt"})._tokens("abcd", [(2, 4)])
    assert tokens[counted].tolist() == [2, 3]


def test_the_first_row_says_what_all_have(tmp_path: Path, run: Prepare) -> None:
    source = put_rows(tmp_path / "source/a.jsonl", {"conversations": []}, DIALOGUE)
    line = f"{str(source)!r}, line 1: has no dialogue: give UTF-8 text; each line of a .jsonl and"
    assert run()[1].startswith(f"error: {line}")
    nulls = {"messages": None, "prompt": "x", "completion": None, "text": "x"}
    assert chat.kind_of(nulls) == "text"
    put_rows(source)
    assert run()[1].startswith(f"error: '{tmp_path}/source': has no dialogue: give UTF-8")


def test_rows_of_a_table(
    tmp_path: Path, run: Prepare, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow's rows have all columns, null where a message has none."""
    empty = {"tool_calls": None, "name": None}
    arguments = {"city": "Paris", "currency": None}  # the second one is of another tool
    call = {"id": None, "function": {"name": "weather", "arguments": arguments}}
    rows = [
        {"messages": [{**USER, **empty}, {**ANSWER, **empty}], "tools": None, "text": None},
        {"messages": [USER, {**CALL, "tool_calls": [call]}], "tools": None, "text": "unused"},
    ]
    batches = [SimpleNamespace(to_pylist=lambda: rows)]
    parquet = SimpleNamespace(
        ParquetFile=lambda file, pre_buffer: SimpleNamespace(
            iter_batches=lambda rows, columns: batches
        )
    )
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    put_rows(tmp_path / "source/a.parquet")
    status, out = run()
    assert status == 0, out
    counted = [counted for _, counted in texts(model, *opened(tmp_path))]
    assert sorted(counted) == [
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call><|im_end|>',
        "It is sunny – 20 °C ☀️.<|im_end|>",
    ]


class Long:
    """The tokens of an example of 2^31 tokens, without memory."""

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, part: slice) -> Long:
        return self

    def __add__(self, counted: object) -> Long:
        return self

    def astype(self, dtype: str) -> Long:
        return self

    def tobytes(self) -> bytes:
        return b""


def test_a_file_may_have_more_than_four_billion_tokens() -> None:
    example = (Long(), np.ones(1, bool), True)
    facts = {"max_len": 2**31, "cut": False}
    made: Any = SimpleNamespace(facts=facts, encode=lambda row: [example])
    file = io.BytesIO()
    record = dialogues.write_examples(file, made, [("", {})] * 3)
    assert record["tokens"] == 3 * 2**31
    shards = [{"tokens": 0, "sha256": ""}]
    index = {"shards": shards, "training": 1, "val_fraction": 0.4, "seed": 0, "facts": {}}
    parts = dialogues.divided([np.frombuffer(file.getvalue(), "<u4")], index)
    assert sorted(parts[0].places[:, 1].tolist() + parts[1].places[:, 1].tolist()) == [
        0,
        2**31,
        2**32,
    ]


def test_a_set_that_is_made_has_no_files(tmp_path: Path) -> None:
    training, validation = made_dialogues.made()
    assert made_dialogues.made()[0].digest == training.digest != validation.digest
    tokenizer = made_dialogues.made_tokenizer()
    tokens, counted = training.take(0)
    assert training.lengths[0] == len(tokens)
    assert training.counted[0] == counted.sum()
    assert re.fullmatch(r"(It \w+s the \w+\.<\|im_end\|>)+", tokenizer.decode(tokens[counted]))

    tokenizer.save_pretrained(tmp_path)
    saved = chat.open_tokenizer(str(tmp_path))
    assert chat.tokenizer_digest(saved) == training.facts["tokenizer"]
    saved(["a", "longer"], padding=True, truncation=True, max_length=3)  # it keeps these
    assert chat.tokenizer_digest(saved) == training.facts["tokenizer"]
    saved.add_tokens(["more"])
    assert chat.tokenizer_digest(saved) != training.facts["tokenizer"]
