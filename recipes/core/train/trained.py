"""A trained classifier, from a checkpoint alone: for predictions and exports."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recipes.core.config import declare, recipe_conf
from recipes.core.data import pillow
from recipes.core.errors import InputError, one_line, shown
from recipes.core.run import entry
from recipes.core.train import checkpoint, optimisation, sharding


@dataclass(frozen=True)
class Trained:
    """model: in eval mode. transform: from an RGB image to its input, float (3, px, px). path: of
    the checkpoint.

    several: whether an image may have several labels: the probabilities of the classes are then
    independent.
    """

    model: nn.Module
    transform: Callable[[Image.Image], Tensor]
    classes: Sequence[str]
    several: bool
    path: Path

    def input(self, image: Image.Image | str | Path) -> Tensor:
        """The model's input (3, px, px) for an image, or for a file, turned as its EXIF data say.
        Raises InputError.
        """
        try:
            if isinstance(image, Image.Image):
                return self.transform(pillow.to_rgb(pillow.upright(image)))
            return self.transform(pillow.decode(pillow.read_file(Path(image))))
        except pillow.Unreadable as error:
            raise InputError(f"{shown(image, 4096)} {error}: give another image") from None

    @torch.inference_mode()
    def probabilities(self, inputs: Tensor) -> Tensor:
        """Probabilities (B, classes) of inputs (B, 3, px, px)."""
        device = next(self.model.parameters()).device
        logits = self.model(inputs.to(device)).float().cpu()
        return logits.sigmoid() if self.several else logits.softmax(1)

    def __call__(self, image: Image.Image | str | Path) -> dict[str, float]:
        """The probability of each class, highest first. Raises InputError."""
        (values,) = self.probabilities(self.input(image)[None]).tolist()
        pairs = zip(self.classes, values, strict=True)
        return dict(sorted(pairs, key=lambda pair: -pair[1]))


def load(run: str | Path, device: str = "cpu") -> Trained:
    """The classifier of a run directory (its best checkpoint, else its newest), or of a checkpoint.

    Its recipe must have the functions ``make_net(cfg, classes, pretrained)`` and
    ``transforms(cfg)``, as finetune has. The averaged weights are used if there are any. Raises
    InputError.
    """
    entry.set_compile_cache()  # torch.onnx, too, reads it
    path = checkpoint_of(Path(run))
    content = checkpoint.read(path)
    about = content["meta"].get("about")
    recipe = str(content["meta"].get("recipe"))
    classes = about.get("classes") if isinstance(about, dict) else None
    recipe_conf.require(recipe, f"{path}: recipe={shown(recipe)}")
    module = importlib.import_module(f"recipes.{recipe}")
    if not (classes and hasattr(module, "make_net") and hasattr(module, "transforms")):
        fix = "give a run of finetune, or of a copy of it; to ask a run of llm, type prompt="
        raise InputError(f"{path}: recipe {recipe} does not keep what a prediction needs: {fix}")
    cfg = declare.build(recipe_conf.load(recipe)[0], content["meta"]["config"])
    net: nn.Module = module.make_net(cfg, classes, pretrained=False)
    try:
        net.load_state_dict(weights_of(content))
    except (RuntimeError, TypeError) as error:
        why = f"{recipe}.make_net() makes a network that does not fit ({one_line(error, 120)})"
        raise InputError(f"{path}: {why}: use the code that the run was trained with") from None
    for part in net.modules():
        if parametrize.is_parametrized(part):
            parametrize.remove_parametrizations(part, "weight")  # LoRA: one matrix again
    _, transform = module.transforms(cfg)
    several = bool(getattr(cfg, "multi_label", False))
    return Trained(net.eval().to(device), transform, list(classes), several, path)


def start_from(
    net: nn.Module, run: str, classes: Sequence[str], say: Callable[[str], object]
) -> None:
    """Loads the weights of a run or checkpoint, selected as by `load`, into ``net``, a classifier
    for ``classes``. Low-rank additions become parts of the weights.

    The head of ``net`` stays, and a line is said, unless the run has the same classes. Raises
    InputError if the networks differ in another layer.
    """
    path = checkpoint_of(Path(run))
    content = checkpoint.read(path)
    weights = _without_lora(weights_of(content))
    meta = content["meta"]
    about = meta.get("about")
    if not isinstance(about, dict) or about.get("classes") != list(classes):
        say(f"weights={path}: trained on other classes, so the last layer is replaced")
        for name, layer in optimisation.heads(net).items():
            weights |= layer.state_dict(prefix=f"{name}.")
    try:
        net.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        arch = meta["config"].get("arch")
        source = f"recipe={meta.get('recipe')}" + (f" arch={arch}" if arch else "")
        raise InputError(
            f"weights={path}: does not fit the network ({one_line(error, 120)}): it is of "
            f"{shown(source)}; give a run of finetune or imagenet with the same arch="
        ) from None


def weights_of(content: checkpoint.Content) -> dict[str, Tensor]:
    """The weights in a checkpoint, the averaged ones if there are any."""
    averages = content.get("ema")
    if not averages:
        return sharding.whole(content["model"])
    names = [name for name in averages if name.startswith("module.")]
    return {name.removeprefix("module."): averages[name] for name in names}


def _without_lora(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with each low-rank addition of `models.add_lora` added to its matrix."""
    merged = dict(weights)
    for name in weights:
        layer, added, rest = name.partition(".parametrizations.weight.")
        if added and rest == "original":
            matrix = merged.pop(name)
            up = merged.pop(f"{layer}{added}0.up")
            down = merged.pop(f"{layer}{added}0.down")
            merged[f"{layer}.weight"] = matrix + (up @ down).view_as(matrix)
    return merged


def checkpoint_of(path: Path) -> Path:
    """The checkpoint at ``path``: the file itself, or the best one of a run directory, else its
    newest. Raises InputError.
    """
    path = path.expanduser()
    if path.is_file() and path.name not in ("best", "latest"):
        return path
    folder, pointer = (path.parent, path.name) if path.is_file() else (path / "checkpoints", "best")
    name = checkpoint.named(folder, pointer)
    paths = [folder / name] if name else checkpoint.candidates(folder)
    if not paths:
        fix = "give a run directory, or a file checkpoints/step-….pt"
        raise InputError(f"{str(path)!r}: has no checkpoint: {fix}")
    return paths[0]
