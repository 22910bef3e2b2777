import os
from pathlib import Path

import pytest

from recipes.core.data import classfolder
from recipes.core.errors import InputError
from tests.unit.data.common import not_root, put


def make(folder: Path, *names: str | bytes) -> Path:
    """Files of one byte below the folder; a name that ends with / is a folder."""
    for name in names:
        path = folder / os.fsdecode(name)
        path.mkdir(parents=True) if str(name).endswith("/") else put(path)
    return folder


def names(listing: classfolder.Listing) -> list[str]:
    return [listing.name(i) for i in range(len(listing))]


def test_a_listing_has_nested_images_and_no_other_or_hidden_files(tmp_path: Path) -> None:
    there = (
        "a/1.jpg a/notes.txt a/._1.jpg a/.hidden/2.jpg a/more/deep/3.JPG .git/4.jpg list.txt "
        "a/folder.jpg/5.png"
    )
    hidden = (
        "@eaDir/a/1.jpg a/@eaDir/1.jpg __MACOSX/1.jpg a/.ipynb_checkpoints/1.jpg a/#recycle/1.jpg"
    )
    make(tmp_path, *there.split(), *hidden.split())
    assert names(classfolder.scan(tmp_path)) == [
        "a/1.jpg",
        "a/folder.jpg/5.png",
        "a/more/deep/3.JPG",
    ]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("a/1.heic a/2.HEIC b/3.avif 4.csv", "2 .heic, 1 .avif, 1 .csv"),
        ("a/1.txt.gz a/v1.2.txt.gz b/c/README b/.DS_Store", "2 .txt.gz, 1 without an ending"),
        ("a/1.\udcff b/2.\udcff", r"2 .\udcff"),
        ("a/.hidden b/@eaDir/1.heic", ""),
    ],
)
def test_files_that_are_left_out_are_counted_by_ending(
    tmp_path: Path, files: str, expected: str
) -> None:
    lines = list[str]()
    classfolder.scan(make(tmp_path, "a/1.jpg", "b/1.jpg", *files.split()), say=lines.append)
    assert lines == ([f"{str(tmp_path)!r}: left out: {expected}"] if expected else [])


@pytest.mark.parametrize("target", [".", "..", "sub", "../dog", "../..", "../dog/sub"])
def test_a_linked_folder_is_read_once(tmp_path: Path, target: str) -> None:
    make(
        tmp_path / "set",
        "cat/1.jpg",
        "cat/sub/2.jpg",
        "dog/3.jpg",
        "dog/more/4.jpg",
        "dog/sub/5.jpg",
    )
    make(tmp_path, "other/6.jpg")
    (tmp_path / "set/cat/sub/z").symlink_to(f"../{target}")
    listing = classfolder.scan(tmp_path / "set")
    assert len(listing) == 5
    of_dog = [listing.read(i) for i in range(5) if listing.label(i) == 1]
    assert len(of_dog) == (2 if target == "../dog/sub" else 3)


def test_two_names_of_a_class_folder_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "cat/1.jpg", "dog/2.jpg")
    (tmp_path / "kitten").symlink_to("cat")
    with pytest.raises(InputError, match="two links to the same class folder: remove one"):
        classfolder.scan(tmp_path)


def test_file_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    make(tmp_path, b"caf\xe9/\xff\n1.jpg", "café/2.jpg", b"caf\xe9/\xe4.jpg")
    listing = classfolder.scan(tmp_path)
    assert [os.fsencode(c) for c in listing.classes] == ["café".encode(), b"caf\xe9"]
    expected = ["café/2.jpg".encode(), b"caf\xe9/\xe4.jpg", b"caf\xe9/\xff\n1.jpg"]
    assert [os.fsencode(name) for name in names(listing)] == expected
    assert all(listing.read(i) == b"x" for i in range(3))
    assert len(listing.digest()) == 64


def test_the_digest_depends_on_names_and_classes(tmp_path: Path) -> None:
    def digest(*files: str) -> str:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        return classfolder.scan(make(root, *files)).digest()

    first = digest("a/1.jpg", "a/2.jpg", "b/3.jpg")
    assert digest("b/3.jpg", "a/2.jpg", "a/1.jpg") == first
    others = [
        ("a/1.jpg", "a/2.jpg", "b/4.jpg"),
        ("a/1.jpg", "b/2.jpg", "b/3.jpg"),
        ("a/1.jpg", "a/2.jpg", "c/3.jpg"),
        # the same bytes in a row
        ("a/1.jpg", "a/1.jpg2.jpg", "b/3.jpg"),
        ("a/1.jpg1.jpg", "a/2.jpg", "b/3.jpg"),
    ]
    assert len({first, *(digest(*files) for files in others)}) == 6


def test_labels_are_positions_in_the_given_classes(tmp_path: Path) -> None:
    make(tmp_path, "b/1.jpg")
    listing = classfolder.scan(tmp_path, ("a", "b", "c"))
    assert listing.classes == ("a", "b", "c")
    assert listing.label(0) == 1
    with pytest.raises(InputError, match="class 'b', which the training set lacks"):
        classfolder.scan(tmp_path, ("a", "c"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([".hidden/1.jpg", "notes.txt", "1.JPEG"], "has no class folders"),
        (["a/1.jpg", "b/", "c/x.txt"], "has no image in the class folder 'b': fill or remove it"),
    ],
)
def test_an_invalid_class_folder_is_reported_in_one_line(
    tmp_path: Path, files: list[str], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        classfolder.scan(make(tmp_path, *files))
    message = str(caught.value)
    assert words in message
    assert str(tmp_path) in message
    assert "\n" not in message


def test_an_unreadable_class(reachable: Path) -> None:
    make(reachable, "a/1.jpg")
    (reachable / "a").chmod(0)
    with not_root(), pytest.raises(InputError, match="/a' cannot be read"):
        classfolder.scan(reachable)


def test_a_listing_with_links_equals_torchvisions_image_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    root = tmp_path / "root"
    store = make(tmp_path / "store", "1.jpg", "a/sub/2.jpg", "d/2.jpg", "d/sub/3.jpg")
    make(root, "b/2.jpg", "b/1.png", "a/x/9.JPEG", "a/0.jpeg", "c/q.txt", "c/z.bmp")
    for link, of in (("a/one.jpg", "1.jpg"), ("a/sub", "a"), ("d", "d")):
        (root / link).symlink_to(store / of)
    theirs = datasets.ImageFolder(str(root))
    told: list[object] = []
    listing = classfolder.scan(root, None, told.append)
    assert told == [0, 1, 2, 3]
    assert len(listing) == 9
    ours = [(f"{root}/{listing.name(i)}", listing.label(i)) for i in range(len(listing))]
    assert ours == theirs.imgs
    assert list(listing.classes) == theirs.classes
    assert {ending.encode() for ending in datasets.folder.IMG_EXTENSIONS} < set(classfolder.ENDINGS)
