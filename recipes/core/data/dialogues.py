"""Dialogues as tokens, and which of them the loss counts; how ``recipes.prepare dialogues`` writes
them. Without torch.

A shard of `documents` has the tokens of its examples, uint32, with the highest bit of those that
are counted; then the length of each example, and the number of its counted tokens.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from recipes.core import files
from recipes.core.data import chat, datasets, documents
from recipes.core.data.chat import Encoder, Fault, Unusable
from recipes.core.data.documents import Array, Record
from recipes.core.errors import InputError

VERSION = {"format": "dialogues", "version": 1}
ENDINGS = (".jsonl", ".parquet")
FIX = (
    "give UTF-8 text; each line of a .jsonl and each row of a .parquet "
    "must have messages, or prompt and completion, or text"
)
FIX_OF_ENDS = (
    "set eos_token in tokenizer_config.json to the token with which the chat template ends a turn; "
    "{% endgeneration %} must follow this token"
)
COUNTED = 1 << 31
MOST_NAMED = 5  # rows that a message names


@dataclass(frozen=True)
class Examples:
    """Dialogues as tokens. facts: what they were made with. places: of each example, its shard, its
    first token there, its length and the number of its counted tokens.
    """

    shards: Sequence[Array]
    places: Array
    facts: Record
    digest: str

    def __len__(self) -> int:
        return len(self.places)

    @property
    def lengths(self) -> Array:
        return self.places[:, 2]

    @property
    def counted(self) -> Array:
        return self.places[:, 3]

    def take(self, i: int) -> tuple[Array, Array]:
        """The tokens of an example, int64, and which of them the loss counts. Raises InputError for
        an unknown token.
        """
        shard, begin, length, _ = self.places[i]
        content = self.shards[shard][begin : begin + length].astype(np.int64)
        tokens = content % COUNTED
        if tokens.max() >= self.facts["vocabulary"]:
            raise InputError(f"token {tokens.max()} is not in the vocabulary: prepare it again")
        return tokens, content >= COUNTED


def open_dialogues(data_dir: str) -> tuple[Examples, Examples]:
    """The examples to train on, and those to evaluate. Checks the sizes of the shards, but not
    their SHA-256. Raises InputError.
    """
    folder = datasets.find_files(datasets.DIALOGUES, data_dir)[0].parent
    command = datasets.prepare_command("dialogues", folder.parent)
    again = f"run {command} source=FOLDER model=FOLDER again"
    index = files.read_json(folder / "index.json") or {}
    if not VERSION.items() <= index.items():
        why = "is damaged, or does not describe dialogues"
        raise InputError(f"{str(folder / 'index.json')!r} {why}: {again}")
    shards = []
    for number, record in enumerate(index["shards"]):
        count = record["tokens"] + 2 * record["examples"]
        shards.append(documents.mapped(folder / f"{number:05d}.bin", count, "<u4", again))
    return divided(shards, index)


def divided(shards: Sequence[Array], index: Record) -> tuple[Examples, Examples]:
    """The examples of shards to train on, and those to evaluate: those of the shards from the
    number ``training`` on, else ``val_fraction`` of all, drawn by ``seed``. Raises InputError.
    """
    tables = []
    for number, (shard, record) in enumerate(zip(shards, index["shards"], strict=True)):
        sizes = shard[record["tokens"] :].reshape(-1, 2).astype(np.int64)
        begins = sizes[:, 0].cumsum() - sizes[:, 0]
        tables.append(np.column_stack([np.full(len(sizes), number), begins, sizes]))
    places = np.concatenate(tables)

    is_held = places[:, 0] >= index["training"]
    if index["training"] == len(shards):
        count = max(1, round(len(places) * index["val_fraction"]))
        chosen = random.Random(index["seed"]).sample(range(len(places)), min(count, len(places)))
        is_held[chosen] = True
    if is_held.all() or not is_held.any():
        fix = "give more examples, or another val_fraction= or val="
        raise InputError(f"{is_held.sum()} of {len(places)} examples are held out: {fix}")

    sums = json.dumps([record["sha256"] for record in index["shards"]]).encode()
    training, validation = (
        Examples(
            shards, places[part], index["facts"], hashlib.sha256(sums + part.tobytes()).hexdigest()
        )
        for part in (~is_held, is_held)
    )
    return training, validation


def facts_of(model: str, tokenizer: Any, kind: str, train_on: str) -> Record:
    """What determines the tokens of rows of a kind, besides the rows. Raises InputError."""
    ends = chat.end_tokens(model, tokenizer)
    if kind == "messages" and not tokenizer.chat_template:
        fix = "add chat_template.jinja, or give prompt and completion"
        raise InputError(f"model={model!r}: the tokenizer has no chat template: {fix}")
    template = json.dumps(tokenizer.chat_template).encode()
    return {
        "kind": kind,
        "train_on": train_on,
        "tokenizer": chat.tokenizer_digest(tokenizer),
        "template": hashlib.sha256(template).hexdigest(),
        "vocabulary": len(tokenizer),
        "pad": ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        "ends": ends,
    }


def write(keys: Any, folder: Path, say: documents.Say) -> None:
    """Writes ``source``, a folder, a file or a pattern, into ``folder``, as the keys of prepare
    say. Shards that are there and valid are kept. Raises InputError and MachineError.
    """
    held_out = documents.find_groups(keys.val, ENDINGS, say, key="val") if keys.val else []
    others = {path for group in held_out for path in group}
    groups = documents.find_groups(keys.source, ENDINGS, say, others)
    with documents.reading(groups[0][0], FIX) as rows:
        kind = chat.kind_of(next(iter(rows), None))
        if not kind:
            raise ValueError("it has no dialogue")
    facts = facts_of(keys.model, chat.open_tokenizer(keys.model), kind, keys.train_on)
    facts |= {"max_len": keys.max_len, "cut": keys.too_long == "cut"}
    tasks = [
        (folder / f"{number:05d}.bin", group, keys.model, facts)
        for number, group in enumerate([*groups, *held_out])
    ]
    with documents.preparing(folder):
        records = documents.write_all(folder, write_shard, tasks, keys.workers, say)
        judge(records, keys.too_long, say)
        index = {
            **VERSION,
            "facts": facts,
            "training": len(groups),
            "val_fraction": keys.val_fraction,
            "seed": keys.seed,
            "shards": records,
        }
        files.write_json(folder / "index.json", index)


def write_shard(path: Path, sources: Sequence[Path], model: str, facts: Record) -> Record:
    """Writes the rows of ``sources`` as a shard, unless it exists. Raises InputError."""

    def rows() -> Iterator[tuple[str, Any]]:
        for source in sources:
            with documents.reading(source, FIX) as lines:
                for row in lines:
                    yield f"{str(source)!r}, line {lines.number}", row

    def fill(file: IO[bytes]) -> Record:
        return write_examples(file, Encoder(chat.open_tokenizer(model), facts), rows())

    return documents.write_one(path, sources, facts, fill)


def write_examples(file: IO[bytes], encoder: Encoder, rows: Iterable[tuple[str, Any]]) -> Record:
    """Writes a shard of rows, each with its place, for messages. Returns its record: of each fault,
    the number of rows and the places of the first ones.
    """
    faults = {fault.name: (0, list[str]()) for fault in Fault}

    def note(fault: Fault, place: str) -> None:
        count, places = faults[fault.name]
        faults[fault.name] = (count + 1, [*places, place][:MOST_NAMED])

    sizes = []
    endless = 0
    longest = encoder.facts["max_len"]
    for place, row in rows:
        try:
            tokens, counted, is_ended = encoder.encode(row)
        except Unusable as error:
            note(error.fault, f"{place}{error}")
            continue
        if len(tokens) > longest:
            note(Fault.too_long, f"{place} ({len(tokens)} tokens)")
            if not encoder.facts["cut"]:
                continue
            counted[longest:] = False
            if not counted.any():
                note(Fault.cut_off, place)
                continue
        content = tokens + COUNTED * counted
        file.write(content[:longest].astype("<u4").tobytes())
        sizes.append((min(len(tokens), longest), int(counted.sum())))
        endless += not is_ended
    file.write(np.array(sizes, "<u4").tobytes())
    tokens_written = sum(length for length, _ in sizes)
    return {"tokens": tokens_written, "examples": len(sizes), "endless": endless, "faults": faults}


def judge(records: Sequence[Record], too_long: str, say: documents.Say) -> None:
    """Names rows with faults. Raises InputError if there are some and ``too_long`` is refuse, or if
    the end token is never learnt.
    """
    refused = ""
    for fault in Fault:
        counts, named = zip(*(record["faults"][fault.name] for record in records), strict=True)
        if sum(counts):
            what, fix = fault.value
            places = [place for places in named for place in places]
            line = f"{'; '.join(places[:MOST_NAMED])}: {what} ({sum(counts)} rows): {fix}"
            is_cut = fault is Fault.too_long and too_long == "cut"
            say(f"{'cut' if is_cut else 'left out'}: {line}")
            refused = refused or line
    if refused and too_long == "refuse":
        raise InputError(f"{refused}, or give too_long=drop")

    examples = sum(record["examples"] for record in records)
    endless = sum(record["endless"] for record in records)
    line = f"the end token is not learnt in {endless} of {examples} examples: {FIX_OF_ENDS}"
    if endless and endless == examples:
        raise InputError(line)
    if endless:
        say(f"warning: {line}")
