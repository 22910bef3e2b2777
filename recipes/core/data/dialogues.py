"""Dialogues as tokens, and which of them the loss counts; how ``recipes.prepare dialogues`` writes
them. Without torch.

A shard of `documents` has the tokens of its examples, uint32, with the highest bit of those that
are counted; then of each example its first token (modulo 2^32), its length, the number of counted
tokens, and the number of its row.
"""

import hashlib
import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    first token there, its length, the number of its counted tokens, and its row in the shard.
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
        shard, begin, length = self.places[i, :3]
        content = self.shards[shard][begin : begin + length].astype(np.int64)
        tokens = content % COUNTED
        if tokens.max() >= self.facts["vocabulary"]:
            fix = "prepare the data again, or give a model that has all tokens of its tokenizer"
            raise InputError(f"token {tokens.max()} is not in the vocabulary: {fix}")
        return tokens, content >= COUNTED


def limited(examples: Examples, size: int) -> Examples:
    """``examples`` for a model that has only the first ``size`` tokens of the tokenizer. The data
    must not have the others. If the padding token is one of them, an end token replaces it.
    """
    facts = dict(examples.facts)
    facts["vocabulary"] = min(facts["vocabulary"], size)
    if facts["pad"] >= size:
        facts["pad"] = facts["ends"][0]
    return replace(examples, facts=facts)


def open_dialogues(data_dir: str) -> tuple[Examples, Examples]:
    """The examples to train on, and those to evaluate. Raises InputError."""
    index, shards = documents.opened(
        datasets.DIALOGUES,
        VERSION,
        data_dir,
        lambda record: record["tokens"] + 4 * record["examples"],
    )
    return divided(shards, index)


def divided(shards: Sequence[Array], index: Record) -> tuple[Examples, Examples]:
    """The examples of shards to train on, and those to evaluate: those of the shards from the
    number ``training`` on, else ``val_fraction`` of all, drawn by ``seed``. Raises InputError.
    """
    tables = []
    for number, (shard, record) in enumerate(zip(shards, index["shards"], strict=True)):
        table = shard[record["tokens"] :].reshape(-1, 4).astype(np.int64)
        table[:, 0] = table[:, 1].cumsum() - table[:, 1]  # a shard may have more than 2^32 tokens
        tables.append(np.insert(table, 0, number, axis=1))
    places = np.concatenate(tables)
    is_held = places[:, 0] >= index["training"]
    if index["training"] == len(shards):
        # by rows: examples of the same row are not in both parts
        begins = np.diff(places[:, [0, 4]], axis=0).any(1)
        rows = np.append(0, begins.cumsum())
        known = range(rows[-1] + 1)
        count = min(len(known), max(1, round(len(known) * index["val_fraction"])))
        chosen = random.Random(index["seed"]).sample(known, count)
        is_held = np.isin(rows, chosen)
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
    return {
        "kind": kind,
        "train_on": train_on,
        "tokenizer": chat.tokenizer_digest(tokenizer),
        "template": documents.digest_of(tokenizer.chat_template),
        "vocabulary": len(tokenizer),
        "pad": ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        "ends": ends,
    }


def write(keys: Any, folder: Path, say: documents.Say) -> None:
    """Writes ``source``, a folder, a file or a pattern, into ``folder``, as the keys of prepare
    say. Shards that are there and valid are kept. Raises InputError and MachineError.
    """
    held_out = documents.find_groups(keys.val, ENDINGS, say, key="val") if keys.val else []
    others = {os.path.realpath(path) for group in held_out for path in group}
    groups = documents.find_groups(keys.source, ENDINGS, say, others)
    place, row = next(_rows(itertools.chain(*groups)), (repr(keys.source), None))
    kind = chat.kind_of(row)
    if not kind:
        raise InputError(f"{place}: has no dialogue: {FIX}")
    facts = facts_of(keys.model, chat.open_tokenizer(keys.model), kind, keys.train_on)
    facts |= {"max_len": keys.max_len, "cut": keys.too_long == "cut"}
    fill = partial(write_rows, keys.model, facts)
    with documents.preparing(folder) as target:
        records = documents.write_all(target, [*groups, *held_out], facts, fill, keys.workers, say)
        judge(records, keys.too_long, say)
        index = {
            **VERSION,
            "facts": facts,
            "training": len(groups),
            "val_fraction": keys.val_fraction,
            "seed": keys.seed,
            "shards": [{**record, "faults": None} for record in records],  # they can be many
        }
        files.write_json(target / "index.json", index)


def write_rows(model: str, facts: Record, file: IO[bytes], sources: Sequence[Path]) -> Record:
    """Writes the rows of ``sources`` as a shard, and returns its record. Raises InputError."""
    return write_examples(file, Encoder(chat.open_tokenizer(model), facts), _rows(sources))


def _rows(sources: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """The rows of files, each with its place."""
    for source in sources:
        with documents.reading(source, FIX) as rows:
            is_table = rows.kind == ".parquet"
            for row in rows:
                place = f"{str(source)!r}, line {rows.number}"
                yield place, _without_nulls(row) if is_table else row


def _without_nulls(value: Any) -> Any:
    """A value of a table without nulls: each of its structs has all fields that one in the column
    has, such as the arguments of all tools. Chat templates may require the content of a message.
    """
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_nulls(part)
        for name, part in value.items()
        if part is not None or name == "content"
    }


def write_examples(file: IO[bytes], encoder: Encoder, rows: Iterable[tuple[str, Any]]) -> Record:
    """Writes a shard of rows, each with its place, for messages. Returns its record, which has the
    places of the rows with each fault.
    """
    faults = {fault.name: list[str]() for fault in Fault}
    table = []
    begin = 0
    endless = 0
    longest = encoder.facts["max_len"]
    for number, (place, row) in enumerate(rows):
        try:
            for tokens, counted, is_ended in encoder.encode(row):
                is_too_long = len(tokens) > longest
                if is_too_long:
                    faults["too_long"].append(f"{place} ({len(tokens)} tokens)")
                if is_too_long and not encoder.facts["cut"]:
                    continue
                tokens = tokens[:longest]
                counted = counted[:longest]
                if is_too_long and not counted.any():
                    raise Unusable(Fault.cut_off)
                file.write((tokens + COUNTED * counted).astype("<u4").tobytes())
                table.append((begin, len(tokens), counted.sum(), number))
                begin += len(tokens)
                endless += not is_ended
        except Unusable as error:
            faults[error.fault.name].append(f"{place}{error}")
    file.write(np.array(table, np.int64).astype("<u4").tobytes())
    return {"tokens": begin, "examples": len(table), "endless": endless, "faults": faults}


def judge(records: Sequence[Record], too_long: str, say: documents.Say) -> None:
    """Names rows with faults. Raises InputError if there are some and ``too_long`` is refuse, or if
    the end token is never learnt.
    """
    is_refused = too_long == "refuse"
    label = "cannot be used" if is_refused else "left out"
    refused = ""
    for fault in Fault:
        places = [place for record in records for place in record["faults"][fault.name]]
        if places:
            what, fix = fault.value
            line = f"{'; '.join(places[:MOST_NAMED])}: {what} ({len(places)} rows): {fix}"
            is_cut = fault is Fault.too_long and too_long == "cut"
            say(f"{'cut' if is_cut else label}: {line}")
            refused = refused or line
    if refused and is_refused:
        raise InputError(f"{refused}, or give too_long=drop or too_long=cut")

    examples = sum(record["examples"] for record in records)
    endless = sum(record["endless"] for record in records)
    line = f"the end token is not learnt in {endless} of {examples} examples: {FIX_OF_ENDS}"
    if endless and endless == examples:
        raise InputError(line)
    if endless:
        say(f"warning: {line}")
