"""The recipe llm: its losses against a plain loop, on several ranks and packed or not; low-rank
additions; what it exports; what it refuses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes import export, llm, predict
from recipes.conf.llm import Config
from recipes.core import errors
from recipes.core.config import declare
from recipes.core.config.run_keys import Dtype
from recipes.core.data import hub, made_dialogues
from recipes.core.data.token_batches import Rows, TokenBatches, collate
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.train import causal, checkpoint, trained
from tests import helpers, states
from tests.distributed import one_rank

KINDS = ("llama", "qwen3")
SMALL = ("dataset=made", "max_len=160", "global_batch_size=4", "max_steps=4", "cpu_threads=1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models with random weights, and the tokenizer of ``dataset=made``."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = made_dialogues.made_tokenizer()
    for kind in KINDS:
        net(kind).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    return folder


def net(kind: str, **more: Any) -> Any:
    """A tiny model. The weights are large, so that each token matters."""
    library = hub.transformers()
    tokenizer = made_dialogues.made_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind in KINDS:
        sizes |= {"intermediate_size": 96, "num_key_value_heads": 2, "initializer_range": 0.1}
    if kind == "qwen3":
        sizes |= {"head_dim": 16, "tie_word_embeddings": True}
    torch.manual_seed(1)
    config = library.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **ids, **sizes)
    return library.AutoModelForCausalLM.from_config(config, **more)


def nats(model: Any, rows: Rows) -> Tensor:
    """The sum of the losses of each row."""
    logits = model(rows.tokens, position_ids=rows.positions, use_cache=False).logits
    means, weights = llm.row_losses(logits, rows)
    return means * weights


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_packed_examples_have_the_losses_that_they_have_alone(kind: str, attention: str) -> None:
    model = net(kind, attn_implementation=attention)
    training, _ = made_dialogues.made()
    packed = collate(training, [[3, 1, 4], [5, 9]])
    alone = [nats(model, collate(training, [[i]])) for i in (3, 1, 4, 5, 9)]
    sums = torch.cat([torch.cat(alone[:3]).sum()[None], torch.cat(alone[3:]).sum()[None]])
    counted = packed.counted.sum(1)
    assert counted.tolist() == [
        sum(training.counted[i] for i in row) for row in ([3, 1, 4], [5, 9])
    ]
    assert torch.allclose(nats(model, packed) / counted, sums / counted, rtol=0, atol=1e-5)
    joined = packed._replace(positions=torch.arange(packed.tokens.shape[1])[None])
    assert not torch.allclose(nats(model, joined), sums, rtol=1e-2)


def test_a_model_that_cannot_separate_packed_examples_is_refused() -> None:
    for kind in KINDS:
        causal.require_separate_documents(net(kind).eval())
    for kind in ("bloom", "mamba"):
        with pytest.raises(InputError, match=r"does not separate .*: give pack=false"):
            causal.require_separate_documents(net(kind).eval())


def test_a_model_whose_tokens_attend_to_later_ones_is_refused() -> None:
    """Its losses would be small, since it sees the tokens that it predicts."""
    llm.require_fit(Config(max_len=16, pack=False), net("llama").eval())
    for kind in ("bert", "roberta"):
        with pytest.raises(
            InputError, match="is not a causal language model: its tokens attend to"
        ):
            llm.require_fit(Config(max_len=16, pack=False), net(kind).eval())


def plain_losses(model: Any, cfg: Config) -> list[float]:
    """A training loop with transformers alone, on the batches of the recipe."""
    training, _ = made_dialogues.made()
    size = (cfg.global_batch_size * cfg.max_len, cfg.max_len, cfg.pack)
    batches = TokenBatches(training, *size, cfg.seed, 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), cfg.lr, weight_decay=0.0)
    steps = cfg.max_steps
    rise = max(1.0, cfg.warmup * steps)
    losses = []
    for part in batches.epoch(0):
        step = len(losses)
        if step == steps:
            break
        factor = 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * ((step + 1) / (rise + 1) if step < rise else factor)
        total = 0.0
        counted = sum(training.counted[i] for row in part.rows for i in row)
        for row in part.rows:
            examples = [training.take(i) for i in row]
            tokens = torch.cat([torch.as_tensor(ids) for ids, _ in examples])
            is_counted = torch.cat([torch.as_tensor(flags) for _, flags in examples])
            positions = torch.cat([torch.arange(len(ids)) for ids, _ in examples])
            loss = model(
                tokens[None],
                position_ids=positions[None],
                labels=tokens.where(is_counted, -100)[None],
                use_cache=False,
                num_items_in_batch=counted,
            ).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_a_plain_loop(
    kind: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*SMALL, f"model={models / kind}")
    trained = one_rank.train(llm, tmp_path, monkeypatch, *words)
    cfg = Config(dataset="made", max_len=160, global_batch_size=4, max_steps=4, lr=1e-3)
    expected = plain_losses(
        hub.transformers().AutoModelForCausalLM.from_pretrained(models / kind), cfg
    )
    assert [row["loss"] for row in trained.rows] == pytest.approx(expected, abs=1e-5)
    assert trained.rows[-1]["loss"] < trained.rows[0]["loss"]


def launched(run_dir: Path, ranks: int, *words: str) -> Path:
    """The run directory of a finished run of ``ranks`` ranks."""
    keys = (f"ranks_per_node={ranks}", f"run_dir={run_dir}", "log_every_steps=1")
    helpers.run_fork([*helpers.LOCAL, "recipe=llm", *SMALL, *keys, *words]).expect(0)
    return run_dir


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("pack=false",),
        ("train=lora", "lora_rank=4", "lr=0.001"),
        ("model={}/qwen3",),
    ],
    ids=["packed", "not packed", "additions", "shared weights"],
)
def test_losses_are_the_same_on_any_number_of_ranks(
    tmp_path: Path, models: Path, words: tuple[str, ...]
) -> None:
    """Also in parts, with layers that are computed again, and with a divided model."""
    few = (*(word.format(models) for word in words), "global_batch_size=2")
    alone = helpers.rows(launched(tmp_path / "1", 1, *few))
    losses = [row["loss"] for row in alone]
    assert losses[-1] < losses[0]
    for ranks, *more in (
        (2, "recompute=true"),
        (2, "strategy=fsdp", "accumulate=2", "recompute=true"),
        (3, "accumulate=2"),
        (3, "strategy=fsdp"),
    ):
        name = "-".join(map(str, (ranks, *more)))
        rows = helpers.rows(launched(tmp_path / name, ranks, *few, *more))
        assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-4), name
        assert rows[-1]["val_loss"] == pytest.approx(alone[-1]["val_loss"], abs=1e-4), name
        assert rows[-1]["val_tokens"] == alone[-1]["val_tokens"]


# Prints how many parts of the model rank 0 holds whole after each forward pass of an evaluation,
# and in which type a layer computes. With `stop`, rank 1 is notified to stop in an evaluation.
DIVIDED = """
import os, signal, sys
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from recipes import llm
from recipes.core.train import run, sharding
run.STORE_EVERY_S = 1e9
parts, passes = [], 0
divide, row_losses = sharding.divide, llm.row_losses
def divided(model, *args):
    divide(model, *args)
    parts.extend(part for part in model.modules() if isinstance(part, FSDPModule))
    layer = next(m for m in parts[1].modules() if isinstance(m, torch.nn.Linear))
    types = set()
    layer.register_forward_pre_hook(lambda layer, inputs: types.add(layer.weight.dtype))
    layer.types = types
    parts.append(layer)
def losses(*args):
    global passes
    if not torch.is_grad_enabled():
        passes += 1
        whole = sum(not isinstance(next(part.parameters()), DTensor) for part in parts[:-1])
        if int(os.environ["RANK"]) == 0:
            print("whole", whole, "of", len(parts) - 1, *parts[-1].types, flush=True)
        elif stop and passes == 2:
            os.kill(os.getpid(), signal.SIGUSR2)
    return row_losses(*args)
sharding.divide, llm.row_losses = divided, losses
stop = sys.argv.pop() == "stop"
start = llm.entry.begin("llm")
llm.session.run(llm.main, start)
"""


def divided(run_dir: Path, last: str, *words: str) -> helpers.Ended:
    keys = (*SMALL, "device=cpu", "strategy=fsdp", "global_batch_size=2", f"run_dir={run_dir}")
    return helpers.run_ranks(DIVIDED, [*keys, *words, last], 2)


def test_an_evaluation_gathers_one_block_of_a_divided_model_at_a_time(tmp_path: Path) -> None:
    """In the type of the products; the loss is about that of a model which is not divided."""
    words = ("dtype=bfloat16", "max_steps=2")
    ended = divided(tmp_path / "fsdp", "", *words).expect(0)
    lines = {line for line in ended.lines if line.startswith("whole")}
    assert lines == {"whole 1 of 3 torch.bfloat16"}  # the embedding and the head
    (row,) = (row for row in helpers.rows(tmp_path / "fsdp") if "val_loss" in row)
    alone = helpers.rows(launched(tmp_path / "ddp", 1, "global_batch_size=2", *words))[-1]
    assert row["val_loss"] == pytest.approx(alone["val_loss"], abs=1e-3)
    assert row["loss"] == pytest.approx(alone["loss"], abs=2e-3)


def test_all_ranks_of_a_divided_model_end_an_evaluation_at_the_same_batch(tmp_path: Path) -> None:
    """Although only one rank was notified to stop: the other would wait for its weights."""
    ended = divided(tmp_path, "stop", "max_steps=2", "timeout_s=30").expect(75)
    assert sum(line.startswith("whole") for line in ended.lines) == 2


@pytest.fixture(scope="module")
def run_dir(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with low-rank additions; beside its checkpoints, the logits of its last evaluation."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        lora = ("train=lora", "lora_modules=q_proj,up_proj", "lora_rank=4", "lora_alpha=6")
        words = (*SMALL, f"model={models / 'llama'}", *lora, "lr=0.02", "pack=false")
        trained = one_rank.train(llm, folder, patched, *words)
    forward = trained.evaluation[-1]
    torch.save([forward.inputs, forward.outputs], folder / "answers.pt")
    return folder


def test_low_rank_additions_leave_the_weights_untouched(run_dir: Path, models: Path) -> None:
    weights = checkpoint.read(checkpoint.candidates(run_dir / "checkpoints")[0])["model"]
    before = load_file(models / "llama/model.safetensors")
    added = {name for name in weights if name.endswith((causal.DOWN, causal.UP))}
    assert weights.keys() - added == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)
    layers = {name.rpartition(".")[0].split(".", 3)[3] for name in added}
    assert layers == {"self_attn.q_proj", "mlp.up_proj"}
    assert all(weights[name].any() for name in added)


@torch.no_grad()
def test_an_exported_model_has_the_logits_of_the_evaluation(
    run_dir: Path, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = hub.transformers()
    inputs, logits = torch.load(run_dir / "answers.pt")
    assert export.main([str(run_dir), "hf"]) == 0
    model = library.AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    assert torch.allclose(model(inputs).logits, logits, rtol=0, atol=1e-5)
    base = library.AutoModelForCausalLM.from_pretrained(models / "llama")
    assert not torch.allclose(base(inputs).logits, logits, atol=1e-2)
    with pytest.raises(InputError, match="exists: give another out="):
        export.main([str(run_dir), "hf"])

    folder = tmp_path / "adapter"
    assert export.main([str(run_dir), "hf", f"out={folder}", "adapter=true"]) == 0
    adapter = json.loads((folder / "adapter_config.json").read_text())
    assert adapter["target_modules"] == ["q_proj", "up_proj"]
    for name, down in load_file(folder / "adapter_model.safetensors").items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = load_file(folder / "adapter_model.safetensors")[name.replace("_A.", "_B.")]
            base.get_submodule(layer).weight += adapter["lora_alpha"] / adapter["r"] * up @ down
    assert torch.allclose(base(inputs).logits, logits, rtol=0, atol=1e-5)

    messages = [{"role": "user", "content": "Where is the ship?"}]
    tokenizer = library.AutoTokenizer.from_pretrained(run_dir / "hf")
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=9, do_sample=False)
    expected = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": messages}))
    capsys.readouterr()
    words = [str(run_dir), f"prompts={tmp_path / 'asked.jsonl'}", "max_tokens=9"]
    assert predict.main(words) == 0
    answered = json.loads(capsys.readouterr().out)["messages"]
    assert answered == [*messages, {"role": "assistant", "content": expected}]
    assert predict.main([str(run_dir), f"prompt={messages[0]['content']}", "max_tokens=9"]) == 0
    shown = "\n".join(map(errors.printable, expected.split("\n")))
    assert capsys.readouterr().out == f"{shown}\n"


def test_a_file_of_prompts_is_read_line_by_line(tmp_path: Path, run_dir: Path) -> None:
    path = tmp_path / "asked.jsonl"
    line = '{"messages": [{"role": "user", "content": "a\u2028b"}]}\n'
    path.write_text(f"\ufeff{line}\n{line}")
    assert [len(messages) for messages in predict.dialogues(str(path))] == [1, 1]
    path.write_text(f'{line}{{"text": "?"}}\n')
    with pytest.raises(InputError, match=r"asked.jsonl', line 2: KeyError: 'messages': give {"):
        predict.main([str(run_dir), f"prompts={path}"])


@pytest.mark.parametrize(
    "row",
    [
        b"\xff",
        b'{"messages": []}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "assistant", "content": "It is over there."}]}',
        b'{"messages": [{"role": "user", "content": "?"}], "tools": [{"type": "function"}]}',
    ],
)
def test_a_file_that_has_no_prompts_is_one_line(tmp_path: Path, row: bytes) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_bytes(row)
    with pytest.raises(InputError, match=r"asked.jsonl', line 1: \w+: .*: give {"):
        list(predict.dialogues(str(path)))


def test_a_prompt_is_made_of_tokens_as_in_the_training(run_dir: Path) -> None:
    model = causal.load(run_dir)
    asked = [{"role": "user", "content": "Q:"}]
    assert model.kind == "messages"
    assert len(model._inputs(asked)["input_ids"][0]) > 2
    plain = dataclasses.replace(model, kind="prompt")
    assert model.tokenizer.decode(plain._inputs(asked)["input_ids"][0]) == "Q:"
    with pytest.raises(InputError, match="trained on prompt, without turns: give one message"):
        plain.answer(asked * 2, 1)
    model.tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(InputError, match=r"the chat template fails \(.*no system\): correct the"):
        model.answer(asked, 1)
    with pytest.raises(InputError, match="prompt: is empty: give a text"):
        plain.answer([{"role": "user", "content": ""}], 1)


@pytest.mark.parametrize(
    ("positions", "max_tokens", "most"), [(5, 9, 2), (5, 1, 1), (4, 9, 1), (3, 9, 0), (None, 9, 9)]
)
def test_an_answer_ends_with_the_positions_of_the_model(
    positions: int | None, max_tokens: int, most: int
) -> None:
    """The prompt has three tokens."""
    asked = []

    def generate(input_ids: Tensor, max_new_tokens: int, **options: object) -> Tensor:
        asked.append(max_new_tokens)
        return input_ids

    settings = SimpleNamespace(max_position_embeddings=positions)
    config = SimpleNamespace(get_text_config=lambda: settings)
    limited: Any = SimpleNamespace(config=config, device="cpu", generate=generate)
    tokenizer = made_dialogues.made_tokenizer()
    model = causal.Causal(limited, tokenizer, Path(), {}, {}, "prompt")
    if most:
        model.answer([{"role": "user", "content": "QQQ"}], max_tokens)
        assert asked == [most]
        return
    with pytest.raises(InputError, match="prompt: has 3 tokens, too many for the model"):
        model.answer([{"role": "user", "content": "QQQ"}], max_tokens)


def test_check_estimates_the_rank_with_the_most_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(net: Any, change: object, size: tuple[int, int], *others: bool) -> Any:
        return size[0], *others

    monkeypatch.setattr(causal, "activation_bytes", rows)
    cfg = Config(global_batch_size=7, accumulate=2, dtype=Dtype.tf32, strategy="fsdp")
    assert llm.activation_bytes(cfg, nn.Identity(), 2) == (2, False, True)
    assert llm.activation_bytes(cfg, nn.Identity(), 1) == (4, False, False)


def test_a_checkpoint_is_exported_from_its_own_folder(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir / "checkpoints")
    assert export.main(["step-00000004.pt", "hf", f"out={tmp_path / 'hf'}"]) == 0
    with pytest.raises(InputError, match="'none': has no checkpoint"):
        export.main(["none", "hf"])


def test_a_disk_that_is_too_small_for_an_export_is_named(run_dir: Path, tmp_path: Path) -> None:
    with helpers.small_disk(tmp_path / "small", "128k") as small:
        line = rf"^out='{small}': cannot be written \(.*No space left on device.*\): give an"
        with pytest.raises(MachineError, match=line):
            export.main([str(run_dir), "hf", f"out={small}/hf"])
        assert not [*small.iterdir()]


def test_a_model_that_has_other_weights_than_the_checkpoint_is_one_line(
    run_dir: Path, tmp_path: Path
) -> None:
    """As in another version of transformers, which names the weights differently."""
    shutil.copytree(run_dir, tmp_path / "run")
    path = tmp_path / "run/model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    expected = r"step-00000004\.pt: does not fit the LlamaForCausalLM of .*: use the version of tra"
    with pytest.raises(InputError, match=expected):
        causal.load(tmp_path / "run")


def test_models_that_are_not_usable_are_refused_with_the_fix(models: Path, tmp_path: Path) -> None:
    def changed(**config: Any) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(models / "llama", folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    (tmp_path / "empty").mkdir()
    pickled = changed()
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    lacking = changed()
    weights = load_file(lacking / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    damaged = changed()
    (damaged / "model.safetensors").write_bytes(b"x")
    remote = changed(model_type="mine", auto_map={"AutoModelForCausalLM": "other/repo--mine.Net"})
    for folder, expected in (
        (
            tmp_path / "empty",
            r"has no config\.json: give the folder of a model, as save_pretrained",
        ),
        (pickled, r"has no \.safetensors, but pytorch_model\.bin, a pickle, which can execute"),
        (lacking, r"its files lack lm_head\.weight: give a causal language model"),
        (damaged, r"cannot be loaded \(.*\): fetch it again, or give another one"),
        (changed(model_type="mine"), r"transformers \S+ has no model_type mine: install a newer"),
        (remote, r"transformers \S+ has no model_type mine: install a newer"),
    ):
        with pytest.raises(InputError, match=rf"^model={folder}: .*{expected}"):
            causal.open_model(str(folder), "")
    line = (
        "^model=org/name: is not in the cache .*, run python -m recipes.prepare weights model=org"
    )
    with pytest.raises(MachineError, match=line):
        hub.find("org/name")


def test_weights_do_not_change_with_their_file(models: Path, tmp_path: Path) -> None:
    """The file may be another user's."""
    folder = tmp_path / "model"
    shutil.copytree(models / "llama", folder)
    weights = causal.open_model(str(folder), "").state_dict()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(tensor.equal(before[name]) for name, tensor in weights.items())


def test_a_temperature_without_sampling_can_be_written(models: Path, tmp_path: Path) -> None:
    """As in the generation config of older models, which transformers reads but does not write."""
    folder = tmp_path / "model"
    shutil.copytree(models / "llama", folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    model = causal.open_model(str(folder), "")
    causal.keep(tmp_path, model, made_dialogues.made_tokenizer())
    kept = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert (kept["temperature"], kept["do_sample"]) == (0.6, True)


def with_own_classes(models: Path, tmp_path: Path, config_class: str, model_class: str) -> Path:
    """A copy of a model whose config names classes in Python files beside it."""
    folder = tmp_path / "mine"
    shutil.copytree(models / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": config_class, "AutoModelForCausalLM": model_class}
    config |= {"model_type": "mine", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_code_of_a_model_runs_only_if_its_digest_is_given(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_own_classes(models, tmp_path, "mine.MyConfig", "mine.MyModel")
    mark = tmp_path / "executed"
    (folder / "mine.py").write_text(
        f"open({str(mark)!r}, 'w')\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    of_all = tmp_path / "modules"  # where processes share copies of code
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(of_all))
    asks = r"requires Python code \(mine\.py in .*\): read it, then give allow_code=(\w{16})$"
    with pytest.raises(InputError, match=asks) as refused:
        causal.open_model(str(folder), "")
    digest = str(refused.value).rpartition("=")[2]
    assert not mark.exists()
    assert type(causal.open_model(str(folder), digest)).__name__ == "MyModel"
    assert mark.exists()
    assert not of_all.exists()
    mark.unlink()
    (folder / "mine.py").rename(tmp_path / "mine.py")
    with pytest.raises(InputError, match=r"its config requires mine\.py, which is missing: fetch"):
        causal.open_model(str(folder), hashlib.sha256().hexdigest()[:16])
    (tmp_path / "mine.py").rename(folder / "mine.py")
    config = json.loads((folder / "config.json").read_text())
    for name in ("hidden/other.MyConfig", "/home/other.MyConfig", "other--mine.MyConfig"):
        other = {**config, "auto_map": {**config["auto_map"], "AutoConfig": name}}
        (folder / "config.json").write_text(json.dumps(other))
        with pytest.raises(InputError, match="has no model_type mine"):
            causal.open_model(str(folder), digest)
    (folder / "config.json").write_text(json.dumps(config))
    for file in (folder / "mine.py", folder / "parts/of_it.py"):  # which mine.py may import
        file.parent.mkdir(exist_ok=True)
        with open(file, "a") as text:
            text.write("# changed\n")
        with pytest.raises(InputError, match="requires Python code"):
            causal.open_model(str(folder), digest)
    assert not mark.exists()


def test_a_run_keeps_all_python_files_of_its_model(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save_pretrained of a config writes only the file with its class."""
    folder = with_own_classes(models, tmp_path, "its_config.MyConfig", "its_net.MyModel")
    (folder / "its_config.py").write_text(
        "from transformers import LlamaConfig\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'mine'\n"
    )
    (folder / "its_net.py").write_text(
        "from transformers import LlamaForCausalLM\n"
        "from .its_config import MyConfig\n"
        "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    with pytest.raises(InputError, match="requires Python code") as refused:
        causal.open_model(str(folder), "")
    digest = str(refused.value).rpartition("=")[2]
    words = (*SMALL, f"model={folder}", f"allow_code={digest}")
    one_rank.train(llm, tmp_path / "run", monkeypatch, *words)
    shutil.rmtree(folder)
    assert type(causal.load(tmp_path / "run", "cpu", digest).net).__name__ == "MyModel"


def test_code_in_a_run_of_another_user_does_not_run(run_dir: Path, tmp_path: Path) -> None:
    """Although that run says that it may."""
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    mark = tmp_path / "executed"
    (folder / "model/mine.py").write_text(f"open({str(mark)!r}, 'w')\n")
    config = json.loads((folder / "model/config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    (folder / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="requires Python code") as refused:
        causal.load(folder)
    path = trained.checkpoint_of(folder)
    content = torch.load(path, weights_only=True)
    content["meta"]["config"]["allow_code"] = str(refused.value).rpartition("=")[2]
    torch.save(content, path)
    with pytest.raises(InputError, match="requires Python code"):
        causal.load(folder)
    assert not mark.exists()


def test_an_epoch_of_few_steps_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rates of large batches teach a model nothing in a handful of steps."""
    for size, expected in ((1, False), (64, True)):
        words = [f"global_batch_size={size}", "max_len=256", "max_steps=1"]
        one_rank.train(llm, tmp_path / str(size), monkeypatch, "dataset=made", *words)
        assert ("warning: an epoch has few steps" in capfd.readouterr().out) == expected


def test_a_linear_layer_with_its_own_forward_pass_stays() -> None:
    class Router(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return (super().forward(x),)

    model: Any = net("llama")
    model.model.layers[0].mlp.router = Router(4, 4)
    causal.add_low_rank(model, "", 2, 1.0)
    assert isinstance(model.model.layers[0].mlp.router, Router)
    assert isinstance(model.model.layers[0].mlp.up_proj, causal.LowRank)


def test_every_addition_to_a_mamba_is_trained() -> None:
    """Its code multiplies by the weight of some layers, and does not call these layers."""
    model: Any = net("mamba")
    llm.prepare(Config(train="lora", pack=False), model)
    model(torch.arange(8)[None], use_cache=False).logits.sum().backward()
    added = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in added} == {"in_proj"}
    assert all(gradient is not None for gradient in added.values())
    with pytest.raises(InputError, match="the linear layers of MambaForCausalLM are in_proj: give"):
        causal.add_low_rank(net("mamba"), "dt_proj", 2, 1.0)


def test_words_that_do_not_fit_are_refused(models: Path) -> None:
    training, _ = made_dialogues.made()
    llama = str(models / "llama")
    facts = {**training.facts, "tokenizer": "another"}
    with pytest.raises(InputError, match="has tokens of another tokenizer: run python -m recipes"):
        llm.open_model(Config(model=llama), facts)
    facts = {**training.facts, "template": "another"}
    with pytest.raises(InputError, match="the data has another chat template: run python -m recip"):
        llm.open_model(Config(model=llama), facts)
    facts["kind"] = "prompt"
    read, other = (llm.open_model(Config(model=llama), facts, rank)[0] for rank in (0, 1))
    assert all(tensor.is_meta for tensor in (*other.parameters(), *other.buffers()))
    assert read.generation_config.eos_token_id == facts["ends"]
    for kind in ("named_parameters", "named_buffers"):
        layouts = [
            [(name, value.shape, value.dtype) for name, value in getattr(net, kind)()]
            for net in (read, other)
        ]
        assert layouts[0] == layouts[1]
    with pytest.raises(ConfigError, match="model= is missing: give the model to start from"):
        llm.open_model(Config(), training.facts)
    library = hub.transformers()
    config = library.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(
        InputError, match="train=lora: GPT2LMHeadModel has no linear layer except its"
    ):
        causal.add_low_rank(library.GPT2LMHeadModel(config), "", 2, 1.0)
    line = (
        "lora_modules=q_proj,up: the linear layers of LlamaForCausalLM are q_proj, .*, down_proj:"
    )
    with pytest.raises(InputError, match=line):
        llm.prepare(Config(train="lora", lora_modules="q_proj,up"), net("llama").eval())
    with pytest.raises(InputError, match="max_len=4096: the model has only 2048 positions"):
        llm.require_fit(Config(max_len=4096), net("llama").eval())
    with pytest.raises(ConfigError, match="optimizer=muon: cannot be used with train=lora"):
        Config(train="lora", optimizer="muon")
    with pytest.raises(ConfigError, match="compile=true: requires pack=true"):
        Config(compile=True, pack=False)
    with pytest.raises(InputError, match=r"recompute=true: OpenAIGPTLMHeadModel .*: leave it out"):
        llm.prepare(Config(recompute=True), net("openai-gpt"))
    for model in ("./folder", "$MODELS/qwen"):  # no node replaces a variable
        with pytest.raises(ConfigError, match=r"(folder|qwen): must be a name such as"):
            declare.build(Config, {"model": model})
    assert Config().lr == 1e-5
    assert Config(train="lora").lr == 1e-4
    assert Config(train="lora", lr=0.5).lr == 0.5


def test_an_update_of_muon_is_about_as_large_as_one_of_adamw() -> None:
    """The root mean square of what a step changes in each matrix, without decay; and the decay."""
    model = net("llama")
    optimizer = llm.make_optimizer(Config(optimizer="muon", lr=0.01, weight_decay=0.5), model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    matrices = 0
    for name, p in model.named_parameters():
        is_matrix = ".layers." in name and p.ndim == 2
        decayed = before[name] * (1 - 0.01 * 0.5 * is_matrix)
        change = float((p.detach() - decayed).square().mean().sqrt()) / 0.01
        if is_matrix:
            matrices += 1
            assert 0.1 < change < 0.25, name
        else:
            assert change == pytest.approx(1, rel=1e-2), name
    assert matrices == 2 * 7
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)


@pytest.mark.long
def test_a_resumed_run_ends_with_the_state_of_one_that_never_stopped(
    models: Path, tmp_path: Path
) -> None:
    """Of a divided model, after its newest checkpoint was damaged; with Muon."""
    words = (f"model={models / 'qwen3'}", "strategy=fsdp", "optimizer=muon", "max_steps=6")
    words = (*words, "checkpoint_every_steps=2", "keep_checkpoints=0")
    whole = launched(tmp_path / "whole", 2, *words)
    again = tmp_path / "again"
    shutil.copytree(whole / "checkpoints", again / "checkpoints")
    for path in (again / "checkpoints").glob("step-00000006*"):
        path.unlink()
    (again / "checkpoints/latest").write_text("step-00000004.pt\n")
    (rows,) = (again / "checkpoints").glob("step-00000004.*.rows")
    rows.write_bytes(rows.read_bytes()[:-100])
    launched(again, 2, *words)
    assert helpers.rows(again)[0]["step"] == 3
    for step in (4, 6):
        assert states.at_step(again, step) == states.at_step(whole, step)


@pytest.mark.long
@pytest.mark.fault(29)
def test_a_run_that_is_killed_while_it_saves_ends_like_one_that_is_not(
    models: Path, tmp_path: Path
) -> None:
    """A divided model, whose ranks each write a part. Its input and output share their weights."""
    words = (f"model={models / 'qwen3'}", "strategy=fsdp", "max_steps=12")
    words = (*words, "checkpoint_every_steps=1", "keep_checkpoints=0")
    whole = launched(tmp_path / "whole", 2, *words)
    killed = tmp_path / "killed"
    command = [*helpers.LOCAL, "recipe=llm", *SMALL, "ranks_per_node=2", *words]
    for saves in (1, 4, 7):
        launcher = helpers.start([*command, f"run_dir={killed}", "resume=auto"])

        def is_saving(saves: int = saves) -> bool:
            return len(list(killed.glob("checkpoints/step-*.pt"))) >= saves and any(
                killed.glob("checkpoints/.*/*")
            )

        helpers.wait_until(lambda: is_saving() or None, helpers.START_S, "a save")
        for rank in helpers.children(launcher.pid):
            os.kill(rank, signal.SIGKILL)
        assert helpers.finish(launcher).status
    launched(killed, 2, *words)
    assert states.at_step(killed, 12) == states.at_step(whole, 12)
    losses = [{row["step"]: row["loss"] for row in helpers.rows(run)} for run in (killed, whole)]
    assert losses[0].items() <= losses[1].items()


MEASURE = """
import sys
from pathlib import Path
import torch
from recipes import llm
from recipes.conf.llm import Config
from recipes.core.data import hub
from recipes.core.data.token_batches import Rows
from recipes.core.train import causal, sharding
_, is_half, *words = sys.argv
is_half = is_half == "bfloat16"
cfg = Config(**dict(word.split("=") for word in words))
is_divided = cfg.strategy == "fsdp"
library = hub.transformers()
config = library.LlamaConfig(
    vocab_size=4000, hidden_size=512, intermediate_size=1536, num_hidden_layers=6
)
net = library.AutoModelForCausalLM.from_config(config)
def step(rows, length):
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    places = torch.arange(length).repeat(rows, 1)
    positions = places % 300
    batch = Rows(tokens, positions, places >= 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        logits = net(tokens, position_ids=positions, use_cache=False).logits
    means, _ = llm.row_losses(logits, batch)
    means.sum().backward()
def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
change = lambda net: llm.prepare(cfg, net)
change(net)
trained = sum(p.nbytes for p in net.parameters() if p.requires_grad)
state = sum(p.nbytes for p in net.parameters()) + 3 * trained  # with gradients and AdamW's averages
estimate = causal.activation_bytes(net, change, (2, 1024), is_half, is_divided)
if is_divided:
    torch.distributed.init_process_group("gloo")
    sharding.divide(net, torch.device("cpu"), 2, 0, torch.bfloat16 if is_half else None)
    state //= 2
step(1, 16)  # makes the gradients
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
step(2, 1024)
peak = memory("VmHWM") - before
print("bytes", state + peak, state + estimate, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("float32",),
        ("bfloat16",),
        ("float32", "recompute=1"),
        ("float32", "train=lora"),
        ("float32", "strategy=fsdp"),
        ("bfloat16", "strategy=fsdp"),
        ("bfloat16", "strategy=fsdp", "recompute=1"),
    ],
    ids=" ".join,
)
def test_the_memory_of_a_step_is_estimated_without_computing_it(words: tuple[str, ...]) -> None:
    """Each tensor in its own pages, which are returned when it is freed."""
    environ = helpers.clean_environment(MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="1")
    ranks = 2 if "strategy=fsdp" in words else 1
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    ended = helpers.run(
        [*launcher, "--no-python", sys.executable, "-c", MEASURE, *words], environ=environ
    ).expect(0)
    for line in ended.lines:
        if line.startswith("bytes "):
            peak, estimate = map(int, line.split()[1:])
            assert estimate == pytest.approx(peak, rel=0.1)
    assert "bytes " in ended.out


@pytest.mark.parametrize("read", [lambda x: int(x.sum()), torch.nonzero])
def test_the_memory_of_a_model_that_reads_values_is_not_known(read: Any) -> None:
    """A value, or a shape that depends on values, as the tokens of an expert."""

    class Reads(type(net("llama"))):  # type: ignore[misc]
        def forward(self, tokens: Tensor, **kwargs: Any) -> Any:
            read(tokens)
            return super().forward(tokens, **kwargs)

    model = Reads(net("llama").config)
    assert causal.activation_bytes(model, lambda twin: None, (1, 16), False) is None


def test_a_prompt_and_prompts_are_not_both_answered() -> None:
    with pytest.raises(InputError, match="prompt= and prompts=: give one of them"):
        predict.main(["runs/llm/1234", "prompt=a", "prompts=b.jsonl"])
