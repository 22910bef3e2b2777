"""One's own images: class folders and CSV files, their division into training and validation, and
what is refused.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from recipes import prepare
from recipes.core.data import labelled
from recipes.core.data.labelled import Pictures, open_parts, read_table
from recipes.core.errors import InputError


def image(path: Path, color: str = "red", **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 10), color).save(path, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images of the class a, five of b, one of c."""
    for name, count in (("a", 10), ("b", 5), ("c", 1)):
        for i in range(count):
            image(tmp_path / name / f"{i}.png")
    return tmp_path


def opened(
    folder: Path, table: str = "", several: bool = False, fraction: float = 0.2, seed: int = 0
) -> Any:
    return open_parts("images", str(folder), table, several, fraction, seed, lambda line: None)


def said(folder: Path, table: str = "") -> tuple[Any, list[str]]:
    """The two parts, and the lines about how the data is read."""
    lines = list[str]()
    return open_parts("images", str(folder), table, False, 0.2, 0, lines.append), lines


def images(folder: Path, *names: str) -> Path:
    for name in names:
        image(folder / name)
    return folder


def test_a_share_of_each_class_is_for_validation(folder: Path) -> None:
    (source, train), (_, val) = opened(folder, fraction=0.28)
    assert sorted([*train, *val]) == list(range(16))
    # 2.8 of a, 1.4 of b; the only image of c is for training
    assert [source.label(i) for i in val] == [0, 0, 0, 1]
    others = [opened(folder, fraction=0.28, seed=seed)[1][1] for seed in (0, 1)]
    assert others[0] == val != others[1]
    (_, train), (_, val) = opened(folder, fraction=0.9)
    assert [len(train), len(val)] == [3, 13]  # one of each class is for training


def test_train_and_val_folders_are_taken_as_they_are(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / "train").mkdir(exist_ok=True)
        (folder / name).rename(folder / "train" / name)
    image(folder / "val/b/1.png")
    (source, train), (val_source, val) = opened(folder)
    assert source.classes == ("a", "b")
    assert len(train) == 15
    assert list(val) == [0]
    assert val_source.label(0) == 1
    image(folder / "val/z/1.png")
    with pytest.raises(InputError, match="has the class 'z', which the training set lacks"):
        opened(folder)


@pytest.mark.parametrize(
    ("train", "val", "expected"),
    [
        ("train", "val", "for training 'train', for validation 'val', left out nothing"),
        (
            "Train",
            "Val",
            "warning: .* for training 'Train', for validation 'Val', left out nothing",
        ),
        (
            "TRAINING",
            "valid",
            "warning: .* for training 'TRAINING', for validation 'valid', left out nothing",
        ),
        (
            "train",
            "Validation",
            "warning: .* for training 'train', for validation 'Validation', left out nothing",
        ),
        ("train", "test", "for training 'train', for validation a part of it, left out 'test'"),
    ],
)
def test_split_folders_are_known_in_any_spelling(
    tmp_path: Path, train: str, val: str, expected: str
) -> None:
    images(
        tmp_path, *(f"{train}/{name}/{i}.png" for name in "ab" for i in range(4)), f"{val}/b/9.png"
    )
    ((source, positions), (val_source, val_positions)), [line] = said(tmp_path)
    assert re.search(expected, line)
    assert source.classes == ("a", "b")
    counts = (6, 2) if val == "test" else (8, 1)
    assert (len(positions), len(val_positions)) == counts
    assert val_source.label(val_positions[-1]) == 1


def test_class_folders_are_named_in_the_first_line(folder: Path) -> None:
    assert said(folder)[1] == [f"{str(folder)!r}: its folders are the classes: 3, 'a' to 'c'"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("train/a/1.png", "Training/a/2.png"),
            "'Training' and 'train' for the same split: remove or rename one",
        ),
        (("train/a/1.png", "val/a/2.png", "valid/a/2.png"), "'val' and 'valid' for the same split"),
        (
            ("test/1.png", "drive/1.png"),
            "the folder 'test' without a folder train: add train/<class>/; if it is a class",
        ),
        (("Val/a/1.png", "Test/a/1.png"), "the folder 'Test' without a folder train"),
        (
            ("PetImages/Cat/1.png", "PetImages/Dog/1.png", "PetImages/0.png"),
            "only the class 'PetImages': .*, give data_dir='.*/PetImages'",
        ),
        (
            ("train/all/a/1.png", "val/all/a/1.png"),
            "only the class 'all': .*, give data_dir='.*/train/all'",
        ),
        (
            ("archive/train/a/1.png", "archive/val/a/1.png"),
            "only the class 'archive': .*, give data_dir='.*/archive'",
        ),
        (("cat/1.png", "cat/2.png"), "only the class 'cat': give images of at least two classes"),
    ],
)
def test_ambiguous_folders_are_refused(
    tmp_path: Path, names: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        opened(images(tmp_path, *names))
    assert "\n" not in str(caught.value)


def test_classes_that_differ_only_in_spelling_are_named(tmp_path: Path) -> None:
    _, lines = said(
        images(tmp_path, *(f"{name}/{i}.png" for name in ("Cat", "cat", "dog") for i in range(2)))
    )
    assert lines[1:] == [f"warning: {str(tmp_path)!r}: 'Cat' and 'cat' are read as two classes"]
    table = write(
        tmp_path,
        "file,label",
        "Cat/0.png,1",
        "Cat/1.png,1.0",
        "cat/0.png,01",
        "cat/1.png,2",
        "dog/0.png,2",
    )
    lines = said(tmp_path, table)[1]
    assert [line.partition("csv': ")[2] for line in lines] == [
        f"'01' and {name!r} are read as two classes" for name in ("1", "1.0")
    ]


def test_classes_whose_names_look_equal_are_named_in_ascii(tmp_path: Path) -> None:
    """One name has an accent in its letter, the other one has it as a second code point."""
    names = ("caf\u00e9", "cafe\u0301")
    _, lines = said(images(tmp_path, *(f"{name}/{i}.png" for name in names for i in range(2))))
    both = r"'cafe\u0301' and 'caf\xe9'"
    assert lines[1:] == [f"warning: {str(tmp_path)!r}: {both} are read as two classes"]


def write(folder: Path, *lines: str) -> str:
    (folder / "labels.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    return str(folder / "labels.csv")


def test_a_table_gives_files_labels_and_split(folder: Path) -> None:
    lines = ("train ,a/0.png ,dog ", "val,b/0.png,dog", ",a/1.png,cat", "train,a/2.png,cat")
    table = write(folder, "split,file,label", *lines)
    (source, train), (_, val) = opened(folder, table)
    assert source.classes == ("cat", "dog")
    assert list(train) == [0, 2, 3]
    assert list(val) == [1]
    assert [source.label(i) for i in range(4)] == [1, 1, 0, 0]
    for positions, counts in ((train, [2, 1]), ([2], [1, 0])):
        assert Pictures(source, positions, lambda image: image.size).counts().tolist() == counts


def test_the_next_command_of_prepare_reads_the_same_images(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "file,label", "a/0.png,red", "a/1.png,red;big", "b/0.png,red")
    monkeypatch.chdir(folder)
    words = ["data_dir=.", "labels=labels.csv", "multi_label=true", "pretrained=false"]
    assert prepare.main(["finetune", *words]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    keys = f"pretrained=false labels={folder}/labels.csv multi_label=true data_dir={folder}"
    assert last == f"next: python launch.py recipe=finetune arch=resnet50 {keys}"

    fetched = []
    monkeypatch.setattr(prepare, "prepare_weights", lambda keys, _: fetched.append(keys) or "")
    assert prepare.main(["finetune", *words[:3], "arch=resnet18", "pretrained=IMAGENET1K_V1"]) == 0
    assert [(keys.arch, keys.weights) for keys in fetched] == [("resnet18", "IMAGENET1K_V1")]


def test_prepare_counts_the_images_that_cannot_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a/0.png", "a/1.png"):
        (folder / name).write_bytes(b"no image")
    assert prepare.main(["finetune", f"data_dir={folder}"]) == 2
    said = capsys.readouterr()
    assert said.out.count(" is not an image: remove it, or replace it") == 2
    assert said.err == "error: 2 of 16 images cannot be read: remove or replace them\n"


def test_what_a_table_has_besides_is_named(folder: Path) -> None:
    rows = (
        "a/0.png,dog,Train,7",
        "a/1.png,cat,TRAINING,7",
        "a/2.png,cat,valid,7",
        "a/3.png,ant,Test,7",
    )
    table = write(folder, "file,label,split,age", *rows, "a/0.png,dog,train,8")
    ((source, train), (_, val)), lines = said(folder, table)
    assert source.classes == ("cat", "dog")
    assert list(train) == [0, 1, 3]
    assert list(val) == [2]
    assert [line.partition("csv': ")[2] for line in lines] == [
        "columns that are not read: 'age'",
        "1 rows of the split test are not read",
    ]


def test_an_image_may_have_several_labels(folder: Path) -> None:
    table = write(
        folder,
        "file,label",
        "a/0.png,dog; cat",
        "a/1.png,",
        *(f"a/{i}.png,cow" for i in range(2, 10)),
    )
    (source, train), (_, val) = opened(folder, table, several=True)
    assert source.classes == ("cat", "cow", "dog")
    assert len(train) == 8
    assert len(val) == 2
    pictures = Pictures(source, [1, 5, 0], lambda image: image.size)
    for i, labels in enumerate(([0, 0, 0], [0, 1, 0], [1, 0, 1])):
        assert pictures[i][1].tolist() == labels


def test_a_single_label_that_an_image_may_lack_is_enough(folder: Path) -> None:
    """As in a question with yes or no; of images that have one class each, two are needed."""
    table = write(folder, "file,label", "a/0.png,round", "a/1.png,", "a/2.png,round", "a/3.png,")
    (source, _), _ = opened(folder, table, several=True)
    assert source.classes == ("round",)
    assert [source.label(i).tolist() for i in range(4)] == [[1.0], [0.0], [1.0], [0.0]]


@pytest.mark.parametrize(
    ("lines", "several", "expected"),
    [
        (
            ("file,label", "a/0.png,dog", "a/none.png,dog"),
            False,
            "line 3: '.*/a/none.png' does not exist: correct",
        ),
        (
            ("file,label,note", 'a/0.png,dog,"two', 'lines"', "", "a/none.png,dog,"),
            False,
            "line 5: '.*/a/none.png' does not exist: correct",
        ),
        (
            ("file,label", "a/0.png,dog;cat"),
            False,
            "line 2: label 'dog;cat' must be one class: give one, or multi_label=true",
        ),
        (("file,label", "a/0.png,"), False, "line 2: label '' must be one class"),
        (
            ("file,label,split", "a/0.png,dog,tset"),
            True,
            "line 2: split 'tset' must be train, val or test",
        ),
        (
            ("file,label", "a/0.png,dog", "a/1.png,cat", "a/0.png,dog"),
            False,
            "line 4: 'a/0.png' is also the file of line 2: keep one of the rows",
        ),
        (
            ("file,label,split", "a/0.png,dog,train", "./a/0.png,dog,val"),
            False,
            "line 3: './a/0.png' is also the file of line 2",
        ),
        (
            ("file,label,split", "a/0.png,dog,train", "a/../a/0.png,cat,train"),
            False,
            "is also the file of line 2",
        ),
        (
            ("file,label,split", "a/0.png,dog,test", "a/0.png,dog,train"),
            False,
            "is also the file of line 2",
        ),
        (("file,label", "a/0.png,dog,brown"), False, "line 2: has more values than the first line"),
        (
            ("file,label,split", "a/0.png,dog,train", "a/1.png,dog,val,x"),
            False,
            "line 3: has more values than the first line",
        ),
        (
            ("file,label,label", "a/0.png,dog,cat"),
            False,
            "has the column label twice: remove or rename one",
        ),
        (("file,split,label,split", "a/0.png,train,cat,val"), False, "has the column split twice"),
        (
            ("file, label, split", "a/0.png, dog, train", "a/1.png, cat, train"),
            False,
            "no row has split val: add such rows, or remove the column",
        ),
        (
            ("file,label", "a/0.png,dog,", "a/1.png,dog,"),
            False,
            "has only the class 'dog': give images of at least two",
        ),
        (("file,label", f"{'x' * 300}.png,dog"), False, "line 2: .* does not exist"),
        (
            ("image,class", "a/0.png,dog"),
            False,
            "must have a first line with the columns file,label",
        ),
        (
            ("file,label,split", "a/0.png,dog,train", "a/1.png,cat,val"),
            False,
            "all images of class 'cat', such as 'a/1.png', have split val: ",
        ),
    ],
)
def test_a_faulty_table_is_refused_by_line(
    folder: Path, lines: tuple[str, ...], several: bool, expected: str
) -> None:
    with pytest.raises(InputError, match=r"^(labels=)?'.*labels.csv'") as caught:
        opened(folder, write(folder, *lines), several)
    assert caught.match(expected)


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data_dir='.*/none' does not exist"):
        opened(tmp_path / "none")
    with pytest.raises(InputError, match=r"labels='.*none.csv': cannot be read"):
        read_table(tmp_path / "none.csv", tmp_path, False, print)
    images(tmp_path, "a/1.png", "b/1.png")
    with pytest.raises(InputError, match="too few images for a validation set"):
        opened(tmp_path)


def test_images_are_upright_rgb_and_a_damaged_one_is_named(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image(folder / "a/0.png", exif=exif)
    (folder / "a/1.png").write_bytes(b"no image")
    (folder / "a/2.png").unlink()
    source = labelled.classfolder.scan(folder)
    (folder / "a/3.png").unlink()
    pictures = Pictures(source, range(3), lambda image: (image.size, image.mode))
    assert pictures[0] == (((10, 20), "RGB"), 0)
    with pytest.raises(InputError, match=r"'a/1.png' is not an image: remove it, or replace it"):
        pictures[1]
    with pytest.raises(InputError, match=r"'a/3.png' cannot be read"):
        pictures[2]


def test_the_digest_changes_with_the_images_and_their_part(folder: Path) -> None:
    (source, train), (_, val) = opened(folder)
    first = Pictures(source, train, torch.Tensor).digest()
    assert Pictures(source, list(train), torch.Tensor).digest() == first
    of_another_seed = opened(folder, seed=1)[0][1]
    assert len(of_another_seed) == len(train)
    for positions in (val, of_another_seed):
        assert Pictures(source, positions, torch.Tensor).digest() != first
    image(folder / "a/99.png")
    assert Pictures(opened(folder)[0][0], train, torch.Tensor).digest() != first
    digests = set()
    for name, *labels in (
        ("a", "dog", "cat", "cat"),
        ("a", "cat", "dog", "cat"),
        ("a", "dog", "ant", "ant"),
        ("b", "dog", "cat", "cat"),
    ):
        rows = [f"{name}/{i}.png,{label}" for i, label in enumerate(labels)]
        table = read_table(Path(write(folder, "file,label", *rows)), folder, False, print)
        digests.add(table.digest())
    assert len(digests) == 4
