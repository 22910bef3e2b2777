import dataclasses
import gzip
import hashlib
import importlib
import json
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes import prepare
from recipes.core import files
from recipes.core.data import datasets, hub, progress
from recipes.core.data.datasets import DataFile
from tests.unit.data.common import not_root, put
from tests.unit.data.serving import Answer, Server, content, dropped, serving, status

IMAGES = "tiny-images-idx3-ubyte"
LABELS = "tiny-labels-idx1-ubyte"
# random bytes do not pack, so that the middle of the .gz is the middle of the file
PLAIN = {
    IMAGES: bytes([0, 0, 8, 3])
    + struct.pack(">3I", 400, 28, 28)
    + random.Random(0).randbytes(400 * 28 * 28),
    LABELS: bytes([0, 0, 8, 1]) + struct.pack(">I", 400) + random.Random(1).randbytes(400),
}
PACKED = {name: gzip.compress(content) for name, content in PLAIN.items()}
SERVED = {f"{name}.gz": content for name, content in PACKED.items()}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(SERVED) as running:
        yield running


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """run(url, source=…) prepares the tiny set in tmp_path/data; returns exit status, stdout,
    stderr.
    """
    tiny = [
        DataFile(name, len(plain), hashlib.sha256(plain).hexdigest())
        for name, plain in PLAIN.items()
    ]
    monkeypatch.setattr(datasets, "MNIST_FILES", tiny)

    def go(
        url: str = "http://127.0.0.1:9/", source: str = "", data_dir: Path = tmp_path / "data"
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(datasets, "MNIST_URL", url)
        code = prepare.main(["mnist", f"data_dir={data_dir}", f"source={source}"])
        out, err = capsys.readouterr()
        assert err.count("\n") == (code != 0), "a user's error is one line"
        return code, out, err

    return go


def raw(data_dir: Path) -> Path:
    return data_dir / "MNIST" / "raw"


def there(data_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in raw(data_dir).iterdir()}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
def test_a_planted_file_stops_no_command(
    run: Run, server: Server, tmp_path: Path, kind: str
) -> None:
    path = raw(tmp_path / "data") / datasets.MNIST_FILES[0].name
    path.parent.mkdir(parents=True)
    os.mkfifo(path) if kind == "a named pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not an ordinary file"):
        files.sha256(path)  # as for CIFAR-10
    assert run(server.url)[0] == 0


def test_a_source_with_a_hole_uses_no_memory(run: Run, tmp_path: Path) -> None:
    name = datasets.MNIST_FILES[0].name
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)
    status, _, error = run(source=str(tmp_path))
    assert (status, "has more than" in error) == (2, True)


def test_files_are_fetched_once_and_then_verified(run: Run, server: Server, tmp_path: Path) -> None:
    code, out, _ = run(server.url)
    assert code == 0
    assert there(tmp_path / "data") == PLAIN
    assert f"is in {tmp_path}/data/MNIST/raw" in out
    assert f"next: python launch.py recipe=mnist data_dir={tmp_path}/data" in out
    code, out, _ = run(server.url)
    assert code == 0
    assert out.count("already there, verified") == 2
    assert server.requests == [f"/data/{IMAGES}.gz", f"/data/{LABELS}.gz"]


@pytest.mark.parametrize(
    ("below", "suffix"),
    [
        ("", ""),
        ("MNIST/raw", ".gz"),
    ],
)
def test_files_are_taken_from_a_folder(run: Run, tmp_path: Path, below: str, suffix: str) -> None:
    folder = tmp_path / "source" / below
    folder.mkdir(parents=True)
    for name in PLAIN:
        (folder / (name + suffix)).write_bytes((PACKED if suffix else PLAIN)[name])
    assert run(source=str(tmp_path / "source"))[0] == 0
    assert there(tmp_path / "data") == PLAIN


def test_a_source_that_lacks_a_file_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / f"{IMAGES}.gz").write_bytes(PACKED[IMAGES])
    code, _, err = run(source=str(tmp_path))
    assert f"has no {LABELS}" in err
    assert code == 2


DAMAGED = {
    "cut": (PACKED[IMAGES][:-20], "is damaged"),
    "bytes changed": (
        PACKED[IMAGES][:10] + b"\xff" * 9 + PACKED[IMAGES][19:],
        "is damaged (Error -3",
    ),
    "other content": (gzip.compress(PLAIN[IMAGES][:-1] + b"\0"), "invalid content"),
    "web page": (b"<html>please log in</html>", "has 26 bytes"),
    "bomb": (gzip.compress(bytes(50_000_000)), "has more than "),
}


@pytest.mark.parametrize(("data", "words"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_source_is_refused(run: Run, tmp_path: Path, data: bytes, words: str) -> None:
    for name in PLAIN:
        (tmp_path / f"{name}.gz").write_bytes(data)
    code, _, err = run(source=str(tmp_path))
    assert code == 2
    assert words in err
    assert str(tmp_path / IMAGES) in err
    assert there(tmp_path / "data") == {}


def test_a_damaged_file_is_replaced_only_by_a_valid_one(
    run: Run, server: Server, tmp_path: Path
) -> None:
    final = raw(tmp_path / "data") / IMAGES
    final.parent.mkdir(parents=True)
    final.write_bytes(PLAIN[IMAGES][:-1] + b"\0")
    server.answers[f"{IMAGES}.gz"] = status(404)
    code, _, err = run(server.url)
    assert "HTTP Error 404" in err
    assert code == 3
    assert final.read_bytes() == PLAIN[IMAGES][:-1] + b"\0"
    server.answers.clear()
    for damaged in (PLAIN[IMAGES][:-1] + b"\0", PLAIN[IMAGES] + b"more"):
        final.write_bytes(damaged)
        assert run(server.url)[0] == 0
        assert there(tmp_path / "data") == PLAIN


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (content(b"<html>"), 2, "has 6 bytes instead of"),
        (dropped, 3, "IncompleteRead"),
        (lambda handler: time.sleep(1), 3, "TimeoutError"),
    ],
    ids=["web page", "drops the connection", "is silent"],
)
def test_a_server_that_misbehaves_is_named_and_leaves_no_file(
    run: Run,
    server: Server,
    tmp_path: Path,
    answer: Answer,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare, "TIMEOUT_S", 0.3)
    server.answers = {f"{name}.gz": answer for name in PLAIN}
    code, _, err = run(server.url)
    assert code == status, err
    assert words in err
    assert f"{server.url}{IMAGES}.gz" in err
    assert there(tmp_path / "data") == {}


def test_a_download_says_how_far_it_is(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0)
    data = bytes(5 << 19)
    url = f"{server.url}large"
    server.answers["large"] = content(data)
    assert prepare.download(url) == data
    lines = capsys.readouterr().out.splitlines()
    for n in (1, 2):
        assert lines[n].startswith(f"{url}: {n} of 2 MiB, about")


def test_offline_the_reason_and_the_fix_are_named(run: Run) -> None:
    with Server({}) as closed:
        port = closed.server_port
    code, _, err = run(f"http://127.0.0.1:{port}/a/")
    assert code == 3
    for words in (f":{port}/a/{IMAGES}", "Connection refused", "login node", "source=", "PROXY"):
        assert words in err


@pytest.mark.parametrize(
    ("kind", "status", "fix"),
    [
        ("GatedRepoError", 2, "give its name on the Hugging Face hub; a gated or private model"),
        ("HFValidationError", 2, "give its name on the Hugging Face hub"),
        ("LocalEntryNotFoundError", 3, "run this command on a machine with internet"),
    ],
)
def test_a_model_that_cannot_be_fetched_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    status: int,
    fix: str,
) -> None:
    library = pytest.importorskip("huggingface_hub", reason="optional: pip install '.[llm]'")
    cls = getattr(importlib.import_module("huggingface_hub.errors"), kind)
    error = cls.__new__(cls)  # without the response of a server

    def refuse(name: str, allow_patterns: object) -> None:
        raise error

    monkeypatch.setattr(library, "snapshot_download", refuse)
    assert prepare.main(["weights", "model=org/name"]) == status
    err = capsys.readouterr().err
    assert err.startswith(f"error: model=org/name: {kind}")
    assert f": {fix}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("licence", ["mit", "cc-by-nc-4.0", None])
def test_a_licence_that_restricts_the_use_of_weights_is_named(
    licence: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    timm = SimpleNamespace(
        create_model=lambda name, pretrained: None,
        get_pretrained_cfg=lambda name: SimpleNamespace(license=licence),
    )
    prepare._fetch_from_hub("timm/vit", "vit", timm)
    *warnings, _ = capsys.readouterr().out.splitlines()
    line = f"timm/vit: the licence of these weights is {licence or 'unknown'}: read it before"
    assert [warning[: len(line)] for warning in warnings] == [line] * (licence != "mit")


def test_a_model_that_was_fetched_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hub also lists files that `hub.fetch` leaves out, such as README.md."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="optional: .[llm]")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / commit
    fetched = ("config.json", "model.safetensors")
    for name in fetched:
        put(snapshot / name)
    put(repository / "refs/main", commit.encode())
    files = {name: {"size": 1, "blob_id": commit} for name in (*fetched, "README.md")}
    listing = json.dumps({"format_version": 1, "files": files})  # of huggingface_hub 2.4
    put(repository / f"trees/{commit}.json", listing.encode())
    assert hub.find("org/name") == snapshot


def test_an_unwritable_data_dir_is_refused(run: Run, server: Server, reachable: Path) -> None:
    (reachable / "data").mkdir(mode=0o555)
    with not_root():
        code, _, err = run(server.url, data_dir=reachable / "data")
    assert code == 3
    assert f"error: {reachable}/data/MNIST: Permission denied" in err


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        ("mnist source={}/locked data_dir={}/out", "source"),
        ("imagenet source={} data_dir={}/locked/out", "data_dir"),
    ],
)
def test_missing_permission_names_key(
    argv: str, key: str, reachable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (reachable / "locked").mkdir(mode=0)
    (reachable / "out").mkdir(mode=0o777)
    (reachable / "out").chmod(0o777)
    with not_root():
        assert prepare.main(argv.replace("{}", str(reachable)).split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {key}: '{reachable}/locked/")
    assert "cannot be read (Permission denied): make it readable" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["mnits"], ["mnits: give a dataset first", "did you mean 'mnist'?"]),
        (["mnist", "datadir=x"], ["datadir=x", "did you mean 'data_dir'?"]),
        (["mn\nist"], ["mn\\nist"]),
        (
            ["imagenet", "data_dir=x"],
            ["an account at image-net.org", "sort a flat val/ into class folders first"],
        ),
        (["imagenet", "source=x"], ["data_dir= is missing"]),
        (
            ["imagenet", "data_dir=x", "source=y", "quality=101"],
            ["quality=101: must be at most 100"],
        ),
    ],
)
def test_bad_arguments_are_one_line(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize("argv", [[], ["mnist", "--help"]])
def test_the_help_names_every_key(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(argv) == 0
    out = capsys.readouterr().out
    assert "python -m recipes.prepare mnist data_dir=DIR" in out
    for keys in (prepare.PrepareKeys, prepare.ImagenetKeys, prepare.WeightsKeys):
        assert all(f"\n  {field.name}=" in out for field in dataclasses.fields(keys))


def test_data_dir_defaults_to_recipes_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECIPES_DATA", raising=False)
    assert datasets.folder_of("") == Path("data")
    monkeypatch.setenv("RECIPES_DATA", "/elsewhere")
    assert datasets.folder_of("") == Path("/elsewhere")
    assert datasets.folder_of("here") == Path("here")
    assert datasets.folder_of("~/data") == Path.home() / "data"
