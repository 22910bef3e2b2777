"""Causal language models of Hugging Face: opened in float32, trained as a whole or by low-rank
additions, and opened from a checkpoint.
"""

import contextlib
import functools
import inspect
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from recipes.core import files
from recipes.core.data import chat, hub
from recipes.core.errors import InputError, one_line, require
from recipes.core.run import entry
from recipes.core.train import checkpoint, sharding, trained

FOLDER = "model"  # in the run directory: config, tokenizer and generation config of the model
DOWN = ".lora_A"  # ends of the names of low-rank additions, as in PEFT
UP = ".lora_B"
# of a model whose step cannot be computed on tensors without data
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# of the logits, relative to the largest
APART = 1e-3
SAME = 1e-5


def open_model(model: str, allow_code: str) -> Any:
    """A model, as for `hub.opened`, in float32 on the CPU. Raises InputError and MachineError."""
    library = hub.transformers()
    hub.find(model)
    with hub.opened(model) as folder:
        trust = hub.allows_code(model, folder, allow_code)
        try:
            net, report = library.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=trust,
                output_loading_info=True,
            )
        except Exception as error:  # of many libraries
            why = f"cannot be loaded ({one_line(error, 120)})"
            fix = "fetch it again, or give another one"
            raise InputError(f"model={model}: {why}: {fix}") from None
    for tensor in (*net.parameters(), *net.buffers()):
        # float32 weights are mapped, so that the owner of their file could change them
        tensor.data = tensor.data.clone()
    if report["missing_keys"]:
        lacking = f"its files lack {min(report['missing_keys'])}"
        raise InputError(f"model={model}: {lacking}: give a causal language model")
    settings = net.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:
        # older models set a temperature without do_sample; transformers does not write this
        settings.do_sample = True
    return net


def without_weights(model: str, allow_code: str) -> Any:
    """A model as of `open_model`, whose weights and buffers have no values, on the meta device."""
    with hub.opened(model) as folder, torch.device("meta"):
        return _from_config(folder, hub.allows_code(model, folder, allow_code))


def _from_config(folder: Path, trust: bool) -> Any:
    """A model in float32 with random weights."""
    library = hub.transformers()
    settings = library.AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    return library.AutoModelForCausalLM.from_config(
        settings, dtype=torch.float32, trust_remote_code=trust
    )


def positions_of(net: Any, otherwise: int) -> int:
    """The number of tokens that a text may have; ``otherwise`` if the model does not tell."""
    return getattr(net.config.get_text_config(), "max_position_embeddings", None) or otherwise


def tiny(tokenizer: Any) -> Any:
    """A Llama with random weights, for dataset=made."""
    library = hub.transformers()
    config = library.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return library.AutoModelForCausalLM.from_config(config)


@torch.inference_mode()
def require_causal(net: Any) -> None:
    """Raises InputError if a token changes the logits before it, as in an encoder such as BERT."""
    tokens = torch.arange(8)[None]
    other = tokens.clone()
    other[0, -1] = 0
    before, after = (net(row, use_cache=False).logits[:, :-1] for row in (tokens, other))
    if not torch.allclose(before, after, rtol=0, atol=SAME * float(before.abs().max())):
        what = "is not a causal language model: its tokens attend to later ones"
        raise InputError(f"model=: {type(net).__name__} {what}: give another model")


@torch.inference_mode()
def require_separate_documents(net: Any) -> None:
    """Raises InputError if a document in a row changes the logits of the next one."""
    tokens = torch.arange(8)[None]
    positions = torch.arange(4).repeat(2)[None]
    try:
        packed = net(tokens, position_ids=positions, use_cache=False).logits[:, 4:]
        alone = net(tokens[:, 4:], use_cache=False).logits
        apart = float((packed - alone).abs().max() / alone.abs().max())
    except TypeError:  # it has no positions
        apart = 1.0
    if not apart <= APART:  # also NaN
        kind = type(net).__name__
        problem = f"{kind} does not separate the examples of a row"
        raise InputError(f"pack=true: {problem}: give pack=false")


class PeakMemory(TorchDispatchMode):
    """While entered, counts the bytes of the tensors that are made. peak: the most at any time.

    existing: tensors whose views do not count.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._used = 0
        self._sizes = WeakIdKeyDictionary()  # by storage; several tensors can share one
        for tensor in existing:
            self._sizes[tensor.untyped_storage()] = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage not in self._sizes:
                self._sizes[storage] = storage.nbytes()
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self._used += size
        self.peak = max(self.peak, self._used)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def activation_bytes(
    net: Any,
    change: Callable[[Any], object],
    shape: tuple[int, int],
    half: bool,
    is_divided: bool = False,
) -> int | None:
    """Bytes that a forward and a backward pass need besides a rank's weights and gradients, from
    tensors without data. None if what the model computes depends on their values, as in some
    mixtures of experts, or if torch cannot compute one of its operators without data.

    change: prepares a model like ``net`` for the training. shape: rows and tokens, which the loss
    all counts. half: whether products are computed in bfloat16. is_divided: whether strategy=fsdp
    divides the model. A rank then also needs what it gathers from other ranks.
    """
    try:
        with FakeTensorMode():
            twin = type(net)(net.config)
            change(twin)
            gathered = 0
            if is_divided:
                gathered = sharding.gathered_bytes(twin, torch.bfloat16 if half else torch.float32)
            if is_divided and half:
                for parameter in {p for block in sharding.blocks(twin) for p in block.parameters()}:
                    parameter.data = parameter.data.bfloat16()
            for parameter in twin.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)
            tokens = torch.zeros(shape, dtype=torch.int64)
            positions = tokens + torch.arange(shape[1])
            with PeakMemory((*twin.parameters(), *twin.buffers(), tokens)) as memory:
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    logits = twin(tokens, position_ids=positions, use_cache=False).logits
                F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
    except UNKNOWN:
        return None
    return memory.peak + gathered


class LowRank(nn.Module):
    """A frozen linear layer, plus the product of two trained matrices (Hu et al., 2021)."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.lora_A = nn.Parameter(torch.empty(rank, layer.in_features))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        added = F.linear(F.linear(x, self.lora_A), self.lora_B)
        return F.linear(x, self.weight, self.bias) + self.scale * added


@functools.cache
def _source(kind: type) -> str:
    with contextlib.suppress(OSError, TypeError):  # it is compiled
        return inspect.getsource(kind)
    return ""


def add_low_rank(net: Any, modules: str, rank: int, scale: float) -> None:
    """Freezes all weights, and adds trained matrices to each linear layer but the head, and but
    those whose weight their parent passes on: they would have no effect. modules: names of those
    layers, separated by commas; "" for all. Raises InputError.
    """
    head = net.get_output_embeddings()
    layers = dict[str, list[tuple[str, nn.Linear]]]()
    for name, layer in net.named_modules():
        # a router of Llama 4 is a linear layer that returns more than a product
        is_plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
        if is_plain and layer is not head:
            parent, _, short = name.rpartition(".")
            # Mamba, in the slow code or in its kernels: self.dt_proj.weight @ x
            passed_on = rf"self\.{short}\.weight[ ,)]"
            if not re.search(passed_on, _source(net.get_submodule(parent).__class__)):
                layers.setdefault(short, []).append((name, layer))
    wanted = modules.split(",") if modules else list(layers)
    kind = type(net).__name__
    if not layers:
        raise InputError(f"train=lora: {kind} has no linear layer except its head: give train=all")
    if not layers.keys() >= set(wanted):
        known = f"the linear layers of {kind} are {', '.join(layers)}"
        raise InputError(f"lora_modules={modules}: {known}: give some of them, or train=all")
    net.requires_grad_(False)
    for short in wanted:
        for name, layer in layers[short]:
            net.set_submodule(name, LowRank(layer, rank, scale))


def merged(weights: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """``weights`` with each low-rank addition as a part of its matrix."""
    whole = {name: value for name, value in weights.items() if not name.endswith((DOWN, UP))}
    for name in weights:
        if name.endswith(UP):
            layer = name.removesuffix(UP)
            added = weights[name] @ weights[layer + DOWN]
            whole[f"{layer}.weight"] = weights[f"{layer}.weight"] + scale * added
    return whole


@dataclass(frozen=True)
class Causal:
    """A trained model in eval mode. path: of the checkpoint. config: the keys of its run. added:
    its low-rank additions, which are parts of the weights of ``net``. kind: of the rows that it was
    trained on, see `chat.KINDS`.
    """

    net: Any
    tokenizer: Any
    path: Path
    config: dict[str, Any]
    added: dict[str, Tensor]
    kind: str

    @torch.inference_mode()
    def answer(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        """The most likely answer to a dialogue, at most ``max_tokens`` long, or as long as the
        positions of the model suffice. Raises InputError.
        """
        inputs = self._inputs(messages).to(self.net.device)
        asked = inputs["input_ids"].shape[1]
        if not asked:
            raise InputError("prompt: is empty: give a text")
        left = positions_of(self.net, asked + max_tokens) - asked
        if left < 1:
            raise InputError(f"prompt: has {asked} tokens, too many for the model: shorten it")
        most = min(max_tokens, left)
        # some models ask for compilation, which takes longer than one answer
        options = {"max_new_tokens": most, "do_sample": False, "disable_compile": True}
        tokens = self.net.generate(**inputs, **options)
        new = tokens[0, asked:]
        return str(self.tokenizer.decode(new, skip_special_tokens=True))

    def _inputs(self, messages: list[dict[str, str]]) -> Any:
        """The tokens of a prompt, as in the training. Raises InputError."""
        if self.kind == "messages":
            try:
                return self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
                )
            except Exception as error:  # whatever the template does
                why = f"the chat template fails ({one_line(error, 80)})"
                fix = "correct the roles and the order of the messages"
                raise InputError(f"prompt: {why}: {fix}") from None
        if len(messages) > 1:
            why = f"the run was trained on {self.kind}, without turns"
            raise InputError(f"prompt: {why}: give one message")
        return self.tokenizer(messages[0]["content"], return_tensors="pt")


def load(run: str | Path, device: str = "cpu", allow_code: str = "") -> Causal:
    """The model of a run directory (its best checkpoint, else its newest), or of a checkpoint.
    Raises InputError.

    allow_code: as for `hub.allows_code`; that of the run does not count, since the run may be
    another user's.
    """
    entry.set_compile_cache()  # the model's own code may compile
    path = trained.checkpoint_of(Path(run))
    content = checkpoint.read(path)
    config = content["meta"]["config"]
    folder = path.absolute().parents[1] / FOLDER
    if not (folder / "config.json").is_file():
        fix = "give a run of llm, or a checkpoint in its run directory"
        raise InputError(f"{path}: {str(folder)!r} has no config.json: {fix}")
    weights = trained.weights_of(content)
    added = {name: value.clone() for name, value in weights.items() if name.endswith((DOWN, UP))}
    with hub.opened(str(folder)) as opened:
        net = _from_config(opened, hub.allows_code(str(folder), opened, allow_code))
        net.generation_config = hub.transformers().GenerationConfig.from_pretrained(opened)
    try:
        net.load_state_dict(merged(weights, config["lora_alpha"] / config["lora_rank"]))
    except RuntimeError as error:
        why = f"does not fit the {type(net).__name__} of {folder} ({one_line(error, 120)})"
        fix = "use the version of transformers that the run was trained with"
        raise InputError(f"{path}: {why}: {fix}") from None
    tokenizer = chat.open_tokenizer(str(folder))
    kind = content["meta"].get("about", {}).get("kind", "messages")
    return Causal(net.eval().to(device), tokenizer, path, config, added, kind)


def write(model: Causal, folder: Path, adapter: bool) -> None:
    """Writes a folder for transformers' from_pretrained; or, with ``adapter``, one for PEFT, which
    has the low-rank additions alone. Raises InputError.
    """
    model.tokenizer.save_pretrained(folder)
    if not adapter:
        model.net.save_pretrained(folder)
        return
    if not model.added:
        raise InputError("adapter=true: the run has no low-rank additions: leave adapter= out")
    layers = [name.removesuffix(UP) for name in model.added if name.endswith(UP)]
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config["model"],
        "r": model.config["lora_rank"],
        "lora_alpha": model.config["lora_alpha"],
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
    files.write_json(folder / "adapter_config.json", about)
    weights = {f"base_model.model.{name}.weight": value for name, value in model.added.items()}
    safetensors = require("safetensors.torch", "llm")
    safetensors.save_file(weights, folder / "adapter_model.safetensors")


def keep(run_dir: Path, net: Any, tokenizer: Any, with_code_of: str = "") -> None:
    """Writes what `load` needs besides a checkpoint. with_code_of: the model whose own Python files
    are part of it; "" for none.

    It replaces the whole folder, which may have links: in a copy of a run of another user, they
    lead to files that this user can write to.
    """
    with tempfile.TemporaryDirectory(dir=run_dir, ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch, FOLDER)
        folder.mkdir()
        for part in (net.config, net.generation_config, tokenizer):
            part.save_pretrained(folder)
        if with_code_of:
            for name, source in hub.python_files(hub.folder_of(with_code_of)).items():
                (folder / name).parent.mkdir(exist_ok=True, parents=True)
                files.write_bytes(folder / name, source.read_bytes())
        with contextlib.suppress(FileNotFoundError):
            os.rename(run_dir / FOLDER, Path(scratch, "old"))
        os.rename(folder, run_dir / FOLDER)
