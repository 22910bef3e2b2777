"""A trained model in use: recipes.load, recipes.predict, recipes.export, from a run of the recipe
finetune.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open

import recipes
from recipes import export, finetune, predict
from recipes.conf.finetune import Config
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.train import checkpoint, trained
from tests.distributed import one_rank

WORDS = (
    "arch=shufflenet_v2_x0_5",
    "pretrained=false",
    "dataset=fake",
    "px=32",
    "val_resize=32",
    "num_workers=0",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with LoRA and averaged weights; beside its checkpoints, the logits of its last
    evaluation.
    """
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        words = (*WORDS, "epochs=1", "train=lora", "ema=0.5", "keep_best=false")
        trained = one_rank.train(finetune, folder, patched, *words)
    forward = trained.evaluation[0]
    torch.save([forward.inputs, forward.outputs], folder / "answers.pt")
    return folder


def test_a_loaded_model_answers_as_in_the_evaluation(run_dir: Path) -> None:
    model = recipes.load(run_dir)
    inputs, logits = torch.load(run_dir / "answers.pt")
    assert not model.model.training
    assert model.probabilities(inputs).allclose(logits.softmax(1), atol=1e-5)
    for name, _ in model.model.named_parameters():
        assert "parametrizations" not in name
    named = recipes.load(run_dir / "checkpoints/step-00000003.pt")
    assert named.classes == ["class 0", "class 1", "class 2"]
    probabilities = model(Image.new("RGB", (50, 40), "red"))
    assert sum(probabilities.values()) == pytest.approx(1)
    assert list(probabilities.values()) == sorted(probabilities.values(), reverse=True)


def test_which_checkpoint_of_a_run_is_used(tmp_path: Path) -> None:
    """The one that is named; of a run, the best, else the newest."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    first, second = (folder / f"step-{step:08d}.pt" for step in (1, 2))
    for path in (first, second):
        path.touch()
    assert trained.checkpoint_of(tmp_path) == second
    checkpoint.point(first, "best")
    checkpoint.point(second, "latest")
    for path, expected in (
        (tmp_path, first),
        (folder / "best", first),
        (folder / "latest", second),
        (second, second),
    ):
        assert trained.checkpoint_of(path) == expected


def test_several_labels_have_probabilities_of_their_own() -> None:
    """Of an image in memory, which is turned as its EXIF data say."""
    sizes = []

    def transform(image: Image.Image) -> torch.Tensor:
        sizes.append(image.size)
        return torch.zeros(1)

    net = torch.nn.Linear(1, 2)
    net.bias.data = torch.tensor([0.0, 2.0])
    image = Image.new("RGB", (20, 10))
    image.getexif()[0x0112] = 6
    model = trained.Trained(net, transform, ["a", "b"], True, Path())
    assert list(model(image).items()) == [("b", pytest.approx(0.880797)), ("a", 0.5)]
    assert sizes == [(10, 20)]


def test_a_training_starts_from_the_weights_of_a_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one with train=lora, whose additions become parts of the weights. A path in a file of keys
    may begin with ~.
    """
    monkeypatch.setenv("HOME", str(run_dir.parent))
    expected = recipes.load(run_dir).model.state_dict()
    classes = ["class 0", "class 1", "class 2"]
    lines = list[str]()

    def started(weights: Path, classes: list[str], arch: str = "shufflenet_v2_x0_5") -> Any:
        cfg = Config(arch=arch, weights=str(weights))
        return finetune.make_net(cfg, classes, say=lines.append).state_dict()

    checkpoints = Path("~", run_dir.name, "checkpoints")
    for weights in (run_dir, checkpoints / "step-00000003.pt"):
        found = started(weights, classes)
        assert all(found[name].allclose(value, atol=1e-6) for name, value in expected.items())
    assert lines == []
    for others in (["a", "b"], classes[::-1]):
        found = started(run_dir, others)
        assert len(found["fc.weight"]) == len(others)
        assert not found["fc.weight"][:2].allclose(expected["fc.weight"][:2])
        for name in expected.keys() - {"fc.weight", "fc.bias"}:
            assert found[name].allclose(expected[name], atol=1e-6), name
        assert "trained on other classes, so the last layer is replaced" in lines.pop()
    line = "it is of recipe=finetune arch=shufflenet_v2_x0_5; give a run of finetune or imagenet"
    with pytest.raises(InputError, match=line):
        started(run_dir, classes, "resnet18")


def test_what_cannot_be_loaded_is_named(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(InputError, match="has no checkpoint: give a run directory"):
        recipes.load(tmp_path)
    content = checkpoint.read(run_dir / "checkpoints/step-00000003.pt")
    for change, error, expected in (
        ({"recipe": "mnist"}, InputError, "recipe mnist does not keep what a prediction needs"),
        ({"recipe": "gone"}, ConfigError, "recipe=gone: must be one of"),
        ({"about": None}, InputError, "recipe finetune does not keep what a prediction needs"),
        (
            {"about": {"classes": ["one"]}},
            InputError,
            r"finetune\.make_net\(\) makes a network that does not fit",
        ),
    ):
        meta = {**content["meta"], **change}
        torch.save({**content, "meta": meta}, tmp_path / "changed.pt")
        with pytest.raises(error, match=expected):
            recipes.load(tmp_path / "changed.pt")


def test_predictions_name_images_in_order(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    tall = Image.effect_noise((30, 50), 90).convert("RGB")
    tall.save(tmp_path / "b.png")
    tall.rotate(90, expand=True).save(tmp_path / "c.png", exif=exif)  # the same image, to be turned
    Image.effect_noise((30, 50), 10).save(tmp_path / "a.png")
    assert predict.main([str(run_dir), str(tmp_path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(row["file"]).name for row in rows] == ["a.png", "b.png", "c.png"]
    assert rows[1]["probabilities"] == rows[2]["probabilities"] != rows[0]["probabilities"]
    probabilities = rows[0]["probabilities"]
    assert rows[0]["class"] == max(probabilities, key=probabilities.get)
    table = tmp_path / "out.csv"
    assert predict.main([str(run_dir), "--csv", str(table), str(tmp_path / "b.png")]) == 0
    with open(table) as file:
        head, row = csv.reader(file)
    assert head == ["file", "class", "class 0", "class 1", "class 2"]
    assert row[:2] == [str(tmp_path / "b.png"), rows[1]["class"]]
    assert float(row[3]) == pytest.approx(rows[1]["probabilities"]["class 1"], abs=1e-6)
    assert predict.main([str(run_dir), str(tmp_path / "b.png")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'b.png'}  {rows[1]['class']} 0.")
    with pytest.raises(MachineError, match=r"^--csv='.*/none': cannot be written .*other --csv=$"):
        predict.main([str(run_dir), "--csv", str(tmp_path / "none/t.csv"), str(tmp_path / "b.png")])
    (tmp_path / "._b.png").write_bytes(b"hidden")
    (tmp_path / "d.png").write_bytes(b"damaged")
    assert predict.main([str(run_dir), str(tmp_path), "--json"]) == 2
    said = capsys.readouterr()
    predicted = [json.loads(line)["file"] for line in said.out.splitlines()]
    assert predicted == [row["file"] for row in rows]
    assert "d.png is not an image: give another image" in said.err


def test_more_images_than_a_batch_have_answers_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the last batch is not full, or has no image that can be read."""

    def read(path: Path) -> torch.Tensor:
        if path.name == "bad":
            raise InputError("bad cannot be read")
        return torch.tensor([float(path.name)])

    model: Any = SimpleNamespace(input=read, probabilities=lambda inputs: inputs)
    monkeypatch.setattr(predict, "BATCH", 2)
    faults = list[str]()
    paths = [Path(name) for name in ("3", "bad", "1", "2", "bad")]
    assert list(predict.answers(model, paths, faults)) == [
        (Path("3"), [3.0]),
        (Path("1"), [1.0]),
        (Path("2"), [2.0]),
    ]
    assert faults == ["bad cannot be read"] * 2


def test_an_export_keeps_outputs_and_classes(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = recipes.load(run_dir)
    assert export.main([str(run_dir), "safetensors"]) == 0
    with safe_open(run_dir / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == list(model.classes)
        assert "Normalize" in file.metadata()["transform"]
        for name, value in model.model.state_dict().items():
            assert file.get_tensor(name).equal(value)
    onnxruntime = pytest.importorskip("onnxruntime")
    assert export.main([str(run_dir), "onnx", f"out={tmp_path / 'm.onnx'}"]) == 0
    assert "its outputs are within" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(model.classes)
    inputs, logits = torch.load(run_dir / "answers.pt")
    outputs = session.run(None, {"images": inputs[:5].numpy()})
    assert outputs[0] == pytest.approx(logits[:5].numpy(), abs=1e-5)
    for words, expected in (
        (["tflite"], "tflite: must be one of onnx, safetensors"),
        (["onnx", "too=x"], "the key must be out"),
    ):
        with pytest.raises((ConfigError, InputError), match=expected):
            export.main([str(run_dir), *words])


def test_the_file_of_an_export_may_be_in_the_home_folder(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export.main([str(run_dir), "safetensors", "out=~/mine.safetensors"]) == 0
    assert (tmp_path / "mine.safetensors").is_file()
    with pytest.raises(MachineError, match=r"out='.*/none': cannot be written .*: give an"):
        export.main([str(run_dir), "safetensors", "out=~/none/mine.safetensors"])
