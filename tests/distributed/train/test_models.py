"""Classifiers by name: refusals, and pretrained weights, which must be on this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors import torch as safetensors
from torchvision.models import get_model_builder, list_models

from recipes.core.errors import InputError, MachineError
from recipes.core.train import models, optimisation


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for weights."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path / "hub" / "checkpoints"


def test_unknown_models_and_weights_are_refused_with_known_names() -> None:
    line = "arch=resnet51: torchvision has no such classifier; did you mean 'resnet"
    with pytest.raises(InputError, match=line):
        models.classifier("resnet51", "", 10)
    with pytest.raises(InputError, match="no such classifier"):
        models.classifier("fcn_resnet50", "", 10)  # of torchvision's, and no classifier
    # in a recipe the key is pretrained=, and in recipes.prepare weights=
    line = "arch=resnet18: has no weights IMAGENET1K_V9: give one of IMAGENET1K_V1, or true"
    with pytest.raises(InputError, match=line):
        models.classifier("resnet18", "IMAGENET1K_V9", 1000)


def test_random_weights_for_any_number_of_classes() -> None:
    net = models.classifier("resnet18", "", 7, zero_init_residual=True)
    assert net(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    assert not net.layer1[0].bn2.weight.any()  # type: ignore[index, union-attr]
    models.classifier("squeezenet1_0", "", 7, zero_init_residual=True)  # has no residual blocks


def test_missing_weights_name_the_command_that_fetches_them(hub: Path) -> None:
    command = r"recipes\.prepare weights arch=resnet18 weights=IMAGENET1K_V1"
    with pytest.raises(MachineError, match=command) as caught:
        models.classifier("resnet18", "true", 1000)
    assert str(hub) in str(caught.value)


def saved(content: object, folder: Path) -> Path:
    """A file of weights that is named by torchvision's rule: the end is the start of the
    SHA-256.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "made"
    torch.save(content, made)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    return made.rename(folder / f"net-{digest[:8]}.pth")


def test_a_weights_file_is_verified_by_its_hash_and_runs_no_code(tmp_path: Path) -> None:
    good = saved({"a": torch.ones(2)}, tmp_path)
    assert models.fault_of(good) == ""
    good.write_bytes(good.read_bytes() + b"x")
    assert "its SHA-256 differs from the one in its name" in models.fault_of(good)
    code = saved({"a": Path("of any class")}, tmp_path)
    assert "is not a file of weights" in models.fault_of(code)
    assert models.fault_of(tmp_path / "none-12345678.pth") == "does not exist"


@pytest.mark.long
@pytest.mark.parametrize("arch", ["googlenet", "inception_v3"])
def test_weights_with_auxiliary_heads_give_a_net_without_them(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision refuses aux_logits=False beside them."""
    whole = torchvision.models.get_model(arch, weights=None, aux_logits=True, init_weights=False)
    monkeypatch.setattr(models, "fault_of", lambda path: "")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: whole.state_dict())
    net = models.classifier(arch, "true", 1000).train()
    assert net(torch.randn(2, 3, 299, 299)).shape == (2, 1000)
    assert not [name for name in net.state_dict() if name.lower().startswith("aux")]


def test_the_head_of_every_classifier_is_its_last_layer() -> None:
    # One of each family; the others draw their first weights in a way that the device "meta" cannot
    # follow, or that is slow.
    every = list_models(module=torchvision.models)
    families = {get_model_builder(name).__module__: name for name in every}
    names = set(families.values()) - {"googlenet", "inception_v3", "regnet_y_8gf"}
    assert len(names) > 12
    for name in names:
        with torch.device("meta"):
            net = models.classifier(name, "", 7)
        (layer,) = optimisation.heads(net).values()
        assert len(layer.weight) == 7, name


# their heads are a linear layer and a convolution
@pytest.mark.parametrize("arch", ["resnet18", "squeezenet1_0"])
def test_a_new_head_leaves_the_other_weights_as_the_file_has_them(
    hub: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    state = torchvision.models.get_model(arch, weights=None).state_dict()
    path = saved(state, hub)
    monkeypatch.setattr(models, "cached", lambda weights: path)
    net = models.classifier(arch, "true", 3, new_head=True).eval()
    (name,) = optimisation.heads(net)
    assert net(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    for key, value in net.state_dict().items():
        if not key.startswith(name):
            assert value.equal(state[key])
    with pytest.raises(InputError, match="are for 1000 classes, the data has 3"):
        models.classifier(arch, "true", 3)
    same = models.classifier(arch, "true", 1000, new_head=True).state_dict()
    assert all(value.equal(state[key]) for key, value in same.items())


@pytest.mark.parametrize("kind", ["head", "lora"])
def test_frozen_weights_and_averages_stay_as_they_are(kind: str) -> None:
    torch.manual_seed(0)
    net = models.classifier("shufflenet_v2_x0_5", "", 3)
    x = torch.rand(4, 3, 64, 64)
    before = net.eval()(torch.ones(1, 3, 64, 64))
    net.train()  # as a recipe gets it
    if kind == "head":
        models.train_only_head(net)
    else:
        models.add_lora(net, 4)
    assert net.eval()(torch.ones(1, 3, 64, 64)).allclose(before, atol=1e-6)
    frozen = {name: value.clone() for name, value in net.state_dict().items()}
    frozen = {name: value for name, value in frozen.items() if not name.startswith("fc")}
    optimizer = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), 0.1)
    for _ in range(2):  # at first, the gradient of one of the two matrices is zero
        net.train()(x).square().sum().backward()
        optimizer.step()
    after = net.state_dict()
    changed = [name for name, value in frozen.items() if not value.equal(after[name])]
    for name in changed:
        assert name.endswith((".down", ".up"))
    ups = [name for name in changed if name.endswith(".up")]
    assert len(ups) == (0 if kind == "head" else 56)
    trained = "3,075 of 344,867 parameters are trained (0.9%)"
    if kind == "lora":
        trained = "28,123 of 369,915 parameters are trained (7.6%)"
    assert models.trained(net) == trained


def test_timm_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(InputError, match=r"arch=timm/resnet18: .*pip install '\.\[timm\]'"):
        models.classifier("timm/resnet18", "", 3)


def test_a_model_of_timm_takes_its_weights_from_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm = pytest.importorskip("timm")
    name = "test_resnet.r160_in1k"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    # a job sets the variable before the import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MachineError, match=rf"recipes\.prepare weights arch=timm/{name}"):
        models.classifier(f"timm/{name}", "true", 3)
    state = timm.create_model(name).state_dict()
    folder = tmp_path / f"models--timm--{name}"
    commit = "1" * 40
    snapshot = folder / "snapshots" / commit
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    snapshot.mkdir(parents=True)
    safetensors.save_file(state, snapshot / "model.safetensors")
    net = models.classifier(f"timm/{name}", "true", 3).eval()
    (last,) = optimisation.heads(net)
    assert net(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    for key, value in net.state_dict().items():
        if not key.startswith(last):
            assert value.equal(state[key])
    cfg = timm.get_pretrained_cfg(name)
    assert models.mean_and_std(f"timm/{name}") == (cfg.mean, cfg.std)
    line = "arch=timm/resnet19: timm has no such model; did you mean 'timm/resnet1"
    with pytest.raises(InputError, match=line):
        models.classifier("timm/resnet19", "", 3)
    with pytest.raises(InputError, match="the name of a timm model also selects its weights"):
        models.classifier(f"timm/{name}", "IMAGENET1K_V1", 3)


def test_all_heads_of_a_model_of_timm_are_trained() -> None:
    pytest.importorskip("timm")
    arch = "timm/deit_tiny_distilled_patch16_224"
    net = models.classifier(arch, "", 3)
    assert list(optimisation.heads(net)) == ["head", "head_dist"]
    models.train_only_head(net)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == 2 * 3 * 193
    groups = optimisation.layer_groups(net.requires_grad_(True), 1.0, 0.5, 0.1)
    assert sum(len(group["params"]) for group in groups if group["depth"] == 0) == 4
    line = f"px=64: arch={arch} does not accept images of this size"
    with pytest.raises(InputError, match=line):
        models.require_size(net, arch, 64)


def test_pixels_are_normalised_as_the_weights_require() -> None:
    assert models.mean_and_std("resnet50") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert models.find_weights("resnet50", "true").name == "IMAGENET1K_V2"  # the newest
    assert models.mean_and_std("efficientnet_v2_l") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert len(models.mean_and_std("vit_h_14")[0]) == 3  # has no IMAGENET1K_V1
    assert models.classifier("inception_v3", "", 3).transform_input is True  # as with weights
