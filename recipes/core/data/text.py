"""Text as token ids: shards that are mapped into memory, and how ``recipes.prepare text`` writes
them. Without torch.

A shard of `documents` has the ids of its documents, each document with an end-of-text token behind
it. index.json has tokenizer, dtype, end of text and vocabulary.
"""

import bisect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from recipes.core import errors, files
from recipes.core.data import datasets, documents
from recipes.core.errors import InputError, MachineError

VERSION = {"format": "text", "version": 1}
ENDINGS = (".txt", ".jsonl", ".parquet")
FIX = (
    "give UTF-8 text; each line of a .jsonl and each row of a .parquet "
    "must have a string in the field text"
)
END_OF_TEXT = "<|endoftext|>"  # may separate the documents of a .txt file
MOST_VALIDATION = 2**20  # tokens
Tokens = np.ndarray[Any, np.dtype[Any]]


class Text:
    """Token ids, numbered over all shards. vocabulary: the bytes of each token. end: the
    end-of-text token, which has no bytes.
    """

    def __init__(
        self, shards: Sequence[Tokens], vocabulary: Sequence[bytes], end: int, digest: str
    ) -> None:
        self.vocabulary = vocabulary
        self.end = end
        self.digest = digest
        self._shards = shards
        self._starts = [0, *itertools.accumulate(map(len, shards))]

    def __len__(self) -> int:
        return self._starts[-1]

    def split(self, seq_len: int) -> tuple[range, range]:
        """The sequences to train on, and those to evaluate: the last 1 %, at least one sequence.
        Raises InputError.

        Sequence i predicts the ``seq_len`` tokens after token ``i * seq_len``. All but the first
        and the last few are predicted, once.
        """
        count = (len(self) - 1) // seq_len
        training = count - max(1, min(len(self) // 100, MOST_VALIDATION) // seq_len)
        if training < 1:
            fix = "give a smaller seq_len=, or more text"
            raise InputError(f"seq_len={seq_len}: the text has {len(self)} tokens: {fix}")
        return range(training), range(training, count)

    def take(self, sequences: Sequence[int], seq_len: int) -> Tokens:
        """These sequences, int64 (B, seq_len + 1). Raises InputError for an unknown token."""
        rows = [self._tokens(i * seq_len, (i + 1) * seq_len + 1) for i in sequences]
        tokens = np.array(rows, np.int64).reshape(-1, seq_len + 1)
        if tokens.max(initial=0) >= len(self.vocabulary):
            known = f"one of the {len(self.vocabulary)} of this text"
            raise InputError(f"token {tokens.max()} is not {known}: prepare it again")
        return tokens

    def _tokens(self, begin: int, end: int) -> Tokens:
        number = bisect.bisect_right(self._starts, begin) - 1
        start = self._starts[number]
        tokens = self._shards[number][begin - start : end - start]
        rest = begin + len(tokens)
        return tokens if rest == end else np.append(tokens, self._tokens(rest, end))

    def encode(self, text: str) -> list[int]:
        """The tokens of a short text, by byte-pair merges. They can differ from tiktoken's at line
        breaks and repeated spaces.
        """
        ids = {token: i for i, token in enumerate(self.vocabulary) if token}
        parts = [bytes([byte]) for byte in text.encode()]
        while pairs := [
            (ids[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids
        ]:
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ids[part] for part in parts]

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.vocabulary[token] for token in tokens).decode(errors="replace")


def open_text(data_dir: str) -> Text:
    """The text in ``data_dir``. Raises InputError."""
    index, shards = documents.opened(
        datasets.TEXT, VERSION, data_dir, lambda record: int(record["tokens"])
    )
    vocabulary = [bytes.fromhex(token) for token in index["vocabulary"].split(" ")]
    facts = [(record["tokens"], record["sha256"]) for record in index["shards"]]
    return Text(shards, vocabulary, index["end"], documents.digest_of(facts))


def write(source: str, folder: Path, tokenizer: str, workers: int, say: documents.Say) -> None:
    """Writes ``source``, a folder, a file or a pattern, into ``folder``. Shards that are there and
    valid are kept.

    workers: number of processes, 0: one for each CPU. Raises InputError and MachineError.
    """
    _, vocabulary, end = open_tokenizer(tokenizer)
    dtype = "<u2" if len(vocabulary) <= 2**16 else "<u4"
    groups = documents.find_groups(source, ENDINGS, say)
    fill = partial(write_documents, tokenizer, dtype)
    with documents.preparing(folder) as place:
        index = files.read_json(place / "index.json")
        if index.get("tokenizer", tokenizer) != tokenizer:
            made = f"{str(folder)!r} was made with another tokenizer"
            raise InputError(f"tokenizer={tokenizer}: {made}: give another data_dir=")
        content = {
            **VERSION,
            "tokenizer": tokenizer,
            "dtype": dtype,
            "end": end,
            "shards": documents.write_all(place, groups, tokenizer, fill, workers, say),
            "vocabulary": " ".join(token.hex() for token in vocabulary),
        }
        files.write_json(place / "index.json", content)


def write_documents(
    tokenizer: str, dtype: str, file: IO[bytes], sources: Sequence[Path]
) -> documents.Record:
    """Writes the documents of ``sources`` as a shard, and returns its record. Raises InputError."""
    encode, _, end = open_tokenizer(tokenizer)
    for document in itertools.chain.from_iterable(map(_documents, sources)):
        ids = np.append(np.asarray(encode(document), np.int64), end)
        file.write(ids.astype(dtype).tobytes())
    return {"tokens": file.tell() // np.dtype(dtype).itemsize}


def open_tokenizer(name: str) -> tuple[Callable[[str], Any], list[bytes], int]:
    """The function that encodes a document, the bytes of each token, and the end-of-text token.
    Raises InputError, MachineError.
    """
    if name == "bytes":
        vocabulary = [*(bytes([i]) for i in range(256)), b""]
        return lambda text: np.frombuffer(text.encode(), np.uint8), vocabulary, 256
    # tiktoken's own default is a name in /tmp that other users can create first
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path("~/.cache/tiktoken").expanduser()))
    tiktoken = errors.require("tiktoken", "text", f"tokenizer={name}: ")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # no internet
        fix = (
            "run this on a machine with internet, or set TIKTOKEN_CACHE_DIR to a folder "
            "with the tokenizer's file"
        )
        raise MachineError(f"tokenizer={name}: {errors.one_line(error)}: {fix}") from None
    tokens = {encoding.encode_single_token(t): t for t in encoding.token_byte_values()}
    vocabulary = [tokens.get(i, b"") for i in range(encoding.n_vocab)]
    return encoding.encode_ordinary, vocabulary, encoding.eot_token


def _documents(path: Path) -> Iterator[str]:
    """The documents of a file: a line of .jsonl or a row of .parquet is one. Raises InputError."""
    with documents.reading(path, FIX, ["text"]) as rows:
        if rows.kind == ".txt":
            yield from filter(str.strip, _string(rows.file.read()).split(END_OF_TEXT))
            return
        is_table = rows.kind == ".parquet"
        for row in rows:
            if not (is_table and row["text"] in (None, "")):
                yield _string(row["text"])


def _string(value: Any) -> str:
    """A document that can be encoded. Raises ValueError and TypeError."""
    if isinstance(value, bytes):
        value = value.decode("utf-8-sig")
        if "\0" in value:
            raise ValueError("it has zero bytes, as UTF-16 has")
    if not isinstance(value, str):
        raise TypeError(f"text is of the type {type(value).__name__}")
    return value.encode(errors="replace").decode()
