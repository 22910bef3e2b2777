"""Text as token ids: shards that are mapped into memory, and how ``recipes.prepare text`` writes
them. Without torch.

NNNNN.bin    a shard: the ids of its documents, each document with an end-of-text token behind it
NNNNN.json   its number of tokens, its SHA-256, and a digest of what it was made from
index.json   the same of all shards, tokenizer, dtype, end of text and vocabulary; written last
"""

import bisect
import glob
import hashlib
import io
import itertools
import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any

import numpy as np

from recipes.core import errors, files, trust
from recipes.core.data import classfolder, datasets
from recipes.core.errors import InputError, MachineError
from recipes.core.place import processes

VERSION = {"format": "text", "version": 1}
SHARD_BYTES = 1 << 27  # of source; a larger file is one shard
ENDINGS = (".txt", ".jsonl", ".parquet")  # in any case
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
            fix = "give a smaller seq_len="
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
    """The text in ``data_dir``. Checks the sizes of its shards, but not their SHA-256, as it would
    read all of them. Raises InputError.
    """
    folder = datasets.find_files(datasets.TEXT, data_dir)[0].parent
    again = f"run {datasets.prepare_command('text', folder.parent)} source=FOLDER again"
    index = files.read_json(folder / "index.json") or {}
    shards = []
    try:
        vocabulary = [bytes.fromhex(token) for token in index["vocabulary"].split(" ")]
        end = int(index["end"])
        dtype = index["dtype"]
        facts = [(int(shard["tokens"]), str(shard["sha256"])) for shard in index["shards"]]
        known = VERSION.items() <= index.items() and dtype in ("<u2", "<u4")
        if not known or not 0 <= end < len(vocabulary):
            raise ValueError
    except (KeyError, ValueError, TypeError, AttributeError):
        why = "is damaged, or does not describe a text"
        raise InputError(f"{str(folder / 'index.json')!r} {why}: {again}") from None
    for number, (tokens, _) in enumerate(facts):
        path = folder / f"{number:05d}.bin"
        size = tokens * np.dtype(dtype).itemsize
        if not path.is_file() or path.stat().st_size != size:
            raise InputError(f"{str(path)!r} is not a file of {size} bytes: {again}")
        shards.append(np.memmap(path, dtype, "r") if size else np.empty(0, dtype))
    return Text(shards, vocabulary, end, hashlib.sha256(json.dumps(facts).encode()).hexdigest())


def write(
    source: str, folder: Path, tokenizer: str, workers: int, say: Callable[[str], None]
) -> None:
    """Writes ``source``, a folder, a file or a pattern, into ``folder``. Shards that are there and
    valid are kept.

    workers: number of processes, 0: one for each CPU. Raises InputError and MachineError.
    """
    _, vocabulary, end = open_tokenizer(tokenizer)
    dtype = "<u2" if len(vocabulary) <= 2**16 else "<u4"
    groups = _groups(source, say)
    tasks = [(folder / f"{i:05d}.bin", group, tokenizer, dtype) for i, group in enumerate(groups)]
    count = min(workers or len(os.sched_getaffinity(0)), len(tasks))
    spawn = multiprocessing.get_context("spawn")
    index = folder / "index.json"
    shards = []
    with files.writing_to(folder, "data_dir"):
        trust.own_folder(folder, "data_dir")
    with files.writing_to(folder, "data_dir"), files.locked(folder / "preparing.lock"):
        if (files.read_json(index) or {}).get("tokenizer", tokenizer) != tokenizer:
            made = f"{str(folder)!r} was made with another tokenizer"
            raise InputError(f"tokenizer={tokenizer}: {made}: give another data_dir=")
        index.unlink(missing_ok=True)  # an unfinished text must not look complete
        files.remove_temporary(folder)

        try:
            # An error or Ctrl-C ends map(), which cancels what has not begun.
            with ProcessPoolExecutor(count, spawn, _start, (os.getpid(),)) as pool:
                for shard in pool.map(write_shard, *zip(*tasks, strict=True)):
                    shards.append(shard)
                    say(f"shard {len(shards)} of {len(tasks)}: {shard['tokens']:,} tokens")
        except BrokenProcessPool:
            why = "a worker process died, probably for lack of memory"
            raise MachineError(f"{why}: reduce workers=") from None

        content = {
            **VERSION,
            "tokenizer": tokenizer,
            "dtype": dtype,
            "end": end,
            "shards": shards,
            "vocabulary": " ".join(token.hex() for token in vocabulary),
        }
        files.write_json(index, content)


def _start(parent: int) -> None:
    processes.die_with(parent)()


def _groups(source: str, say: Callable[[str], None]) -> list[list[Path]]:
    """The files of each shard, in the order of their names."""
    root = Path(source).expanduser()
    candidates = list[Path]()
    seen = set[bytes]()
    for path in [root] if root.is_dir() else map(Path, sorted(glob.glob(str(root)))):
        if path.is_dir():  # also Spark's folder of part files, NAME.parquet/
            for place, _, names in classfolder.walk(os.fsencode(path), seen):
                candidates += [Path(os.fsdecode(place), os.fsdecode(name)) for name in names]
        else:
            candidates.append(path)

    paths = list[Path]()
    others = list[bytes]()
    for path in candidates:
        # is_file: not a named pipe or a device in another user's folder
        if path.suffix.lower() in ENDINGS and path.is_file():
            paths.append(path.absolute())
        else:
            others.append(os.fsencode(path.name))
    classfolder.say_left_out(source, others, say)
    if not paths:
        fix = "give a folder, a file or a pattern"
        raise InputError(f"source={source!r} has no .txt, .jsonl or .parquet: {fix}")

    groups = defaultdict[int, list[Path]](list)
    end = 0
    for path in sorted(paths):
        end += path.stat().st_size
        groups[end // SHARD_BYTES].append(path)
    return [*groups.values()]


def write_shard(path: Path, sources: Sequence[Path], tokenizer: str, dtype: str) -> dict[str, Any]:
    """Writes the documents of ``sources`` and, beside them, their part of index.json, unless both
    exist. Raises InputError.
    """
    facts = [(str(source), source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    identity = hashlib.sha256(json.dumps([tokenizer, facts]).encode()).hexdigest()
    record = files.read_json(path.with_suffix(".json")) or {}
    is_made = record.get("source") == identity and path.is_file()
    if is_made and files.sha256(path) == record["sha256"]:
        return record
    encode, _, end = open_tokenizer(tokenizer)
    digest = hashlib.sha256()

    def fill(file: IO[bytes]) -> None:
        for document in itertools.chain.from_iterable(map(_documents, sources)):
            ids = np.append(np.asarray(encode(document), np.int64), end)
            content = ids.astype(dtype).tobytes()
            digest.update(content)
            file.write(content)

    files.write_whole(path, fill)
    tokens = path.stat().st_size // np.dtype(dtype).itemsize
    record = {"tokens": tokens, "sha256": digest.hexdigest(), "source": identity}
    files.write_json(path.with_suffix(".json"), record)
    return record


def open_tokenizer(name: str) -> tuple[Callable[[str], Any], list[bytes], int]:
    """The function that encodes a document, the bytes of each token, and the end-of-text token.
    Raises InputError, MachineError.
    """
    if name == "bytes":
        vocabulary = [*(bytes([i]) for i in range(256)), b""]
        return lambda text: np.frombuffer(text.encode(), np.uint8), vocabulary, 256
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
    kind = path.suffix.lower()
    number = 0
    try:
        with open(path, "rb", opener=trust.without_links_of_others) as file:
            if kind == ".txt":
                yield from filter(str.strip, _string(file.read()).split(END_OF_TEXT))
                return
            if kind == ".parquet":
                from pyarrow import parquet

                for batch in parquet.ParquetFile(file).iter_batches(columns=["text"]):
                    values = (value for value in batch["text"].to_pylist() if value is not None)
                    yield from filter(None, map(_string, values))
                return
            lines = io.TextIOWrapper(file, "utf-8-sig")
            for number, text in enumerate(lines, 1):  # noqa: B007 (in the message)
                if text.strip():
                    yield _string(json.loads(text)["text"])
    except ModuleNotFoundError:
        raise InputError(f"{str(path)!r}: needs pyarrow: pip install '.[text]'") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = (
            "give UTF-8 text; each line of a .jsonl and each row of a .parquet "
            "must have a string in the field text"
        )
        line = f", line {number}" if number else ""
        raise InputError(f"{str(path)!r}{line}: {errors.one_line(error, 120)}: {fix}") from None


def _string(value: Any) -> str:
    """A document that can be encoded. Raises ValueError and TypeError."""
    if isinstance(value, bytes):
        value = value.decode("utf-8-sig")
        if "\0" in value:
            raise ValueError("it has zero bytes, as UTF-16 has")
    if not isinstance(value, str):
        raise TypeError(f"text is of the type {type(value).__name__}")
    return value.encode(errors="replace").decode()
