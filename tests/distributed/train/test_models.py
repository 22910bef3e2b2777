"""Classifiers by name: refusals, and pretrained weights, which must be on this machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
import torchvision

from recipes import prepare
from recipes.core.errors import InputError, MachineError
from recipes.core.train import models


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for weights."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path / "hub" / "checkpoints"


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"arch=resnet51: torchvision has no such classifier; did you mean 'resnet"):
        models.classifier("resnet51", "", 10)
    with pytest.raises(InputError, match="no such classifier"):
        models.classifier("fcn_resnet50", "", 10)  # of torchvision's, and no classifier


def test_random_weights_for_any_number_of_classes() -> None:
    net = models.classifier("resnet18", "", 7, zero_init_residual=True)
    assert net(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    assert not net.layer1[0].bn2.weight.any()  # type: ignore[index, union-attr]
    models.classifier("squeezenet1_0", "", 7, zero_init_residual=True)  # has no residual blocks


def test_missing_weights_name_the_command_that_fetches_them(hub: Path) -> None:
    with pytest.raises(MachineError, match=r"recipes\.prepare weights arch=resnet18 weights=IMAGENET1K_V1") as caught:
        models.classifier("resnet18", "true", 1000)
    assert str(hub) in str(caught.value)


def test_a_failed_download_of_weights_is_reported_in_one_line(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    for words, status, expected in (
        (["arch=resnet18"], 3, str(hub)),
        (["arch=resnet18", "weights=V9"], 2, "weights=V9: must be one of IMAGENET1K_V1"),
        (["arch=nosuch"], 2, "arch=nosuch"),
    ):
        assert prepare.main(["weights", *words]) == status
        said = capsys.readouterr().err
        assert expected in said
        assert len(said.splitlines()) <= 2  # torch says what it fetches
    assert not list(hub.glob("*"))


class Canary:
    """A pickle that makes a folder when it is loaded without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_weights_file_is_verified_by_its_hash_and_runs_no_code(tmp_path: Path) -> None:
    def named_by_hash(content: object) -> Path:
        torch.save(content, tmp_path / "new")
        digest = hashlib.sha256((tmp_path / "new").read_bytes()).hexdigest()
        return (tmp_path / "new").rename(tmp_path / f"net-{digest[:8]}.pth")

    good = named_by_hash({"a": torch.ones(2)})
    assert models.fault_of(good) == ""
    good.write_bytes(good.read_bytes() + b"x")
    assert "its SHA-256 is not the one in its name" in models.fault_of(good)
    assert "is no file of weights" in models.fault_of(named_by_hash({"a": Canary(tmp_path / "canary")}))
    assert not (tmp_path / "canary").exists()
    assert models.fault_of(tmp_path / "none-12345678.pth") == "is not there"


def test_local_weights_are_loaded(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "fault_of", lambda path: "")  # the test's own have another hash
    torch.manual_seed(1)
    theirs = torchvision.models.resnet18()
    hub.mkdir(parents=True)
    torch.save(theirs.state_dict(), models.cached(models.find_weights("resnet18", "DEFAULT")))
    ours = models.classifier("resnet18", "IMAGENET1K_V1", 1000)
    assert torch.equal(ours.fc.weight, theirs.fc.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("weights", "classes", "words"),
    [
        ("IMAGENET1K_V9", 1000, "weights=IMAGENET1K_V9: must be one of IMAGENET1K_V1, or true"),
        ("true", 10, "the weights are for 1000 classes, the data has 10"),
    ],
)
def test_weights_of_another_shape_are_refused(hub: Path, weights: str, classes: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        models.classifier("resnet18", weights, classes)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["googlenet", "inception_v3"])
def test_weights_with_auxiliary_heads_give_a_net_without_them(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision refuses aux_logits=False beside them."""
    whole = torchvision.models.get_model(arch, weights=None, aux_logits=True, init_weights=False)
    monkeypatch.setattr(models, "fault_of", lambda path: "")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: whole.state_dict())
    net = models.classifier(arch, "true", 1000).train()
    assert net(torch.randn(2, 3, 299, 299)).shape == (2, 1000)
    assert not [name for name in net.state_dict() if name.lower().startswith("aux")]
