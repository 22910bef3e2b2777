"""LLM: fine-tunes a causal language model of Hugging Face on your own dialogues.

    # once, on a machine with internet
    python -m recipes.prepare weights model=Qwen/Qwen3-0.6B
    python -m recipes.prepare dialogues source=chats.jsonl data_dir=/data model=Qwen/Qwen3-0.6B
    sbatch sbatch/llm_1x8.sh data_dir=/data model=Qwen/Qwen3-0.6B
    # a tiny model on dialogues that are made in memory
    python launch.py recipe=llm launcher=local ranks_per_node=2 device=cpu dataset=made

Expected results: not measured on a GPU.
"""

from recipes.core.run import entry

# This must run before torch is imported: it sets variables from keys and env files, and torch reads
# some of them at import.
START = entry.begin("llm") if __name__ == "__main__" else None

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.conf.llm import Config
from recipes.core.config.run_keys import Dtype
from recipes.core.data import chat, dialogues, documents, made_dialogues
from recipes.core.data.token_batches import Rows, TokenBatches, collate
from recipes.core.errors import ConfigError, InputError
from recipes.core.train import (
    causal,
    checkpoint,
    loop,
    models,
    optimisation,
    optimizers,
    scores,
    session,
    sharding,
)
from recipes.core.train.run import Results, Run

# Root mean square of an update of AdamW (Liu et al., "Muon is scalable for LLM training", 2025).
# The mean square of Muon's update of a matrix is about 1 / columns, so it is scaled to this value.
ADAMW_RMS = 0.2
FEW_STEPS = 10  # of an epoch


def open_model(cfg: Config, facts: Mapping[str, Any], rank: int = 0) -> tuple[Any, Any]:
    """The model on the CPU, and its tokenizer. Only rank 0 reads the weights, which
    `World.parallel` copies to the other ranks. facts: those of the training set. Raises InputError
    if the set was made with another tokenizer.
    """
    if not cfg.model:
        if cfg.dataset != "made":
            raise ConfigError("model= is missing: give the model to start from")
        tokenizer = made_dialogues.made_tokenizer()
        return causal.tiny(tokenizer), tokenizer
    tokenizer = chat.open_tokenizer(cfg.model)
    fix = f"run python -m recipes.prepare dialogues again, with model={cfg.model}"
    if cfg.dataset == "made":
        fix = "leave model= out, or give dataset=dialogues"
    if chat.tokenizer_digest(tokenizer) != facts["tokenizer"]:
        raise InputError(f"model={cfg.model}: the data has tokens of another tokenizer: {fix}")
    is_rendered = facts["kind"] == "messages"
    if is_rendered and documents.digest_of(tokenizer.chat_template) != facts["template"]:
        raise InputError(f"model={cfg.model}: the data has another chat template: {fix}")
    if rank:
        return causal.without_weights(cfg.model, cfg.allow_code), tokenizer
    net = causal.open_model(cfg.model, cfg.allow_code)
    net.generation_config.eos_token_id = facts["ends"]
    return net, tokenizer


def require_fit(cfg: Config, net: Any) -> None:
    """Raises InputError if the model has fewer positions than a row, if a token attends to later
    ones, or if the model cannot separate the examples of a packed row.
    """
    longest = causal.positions_of(net, cfg.max_len)
    if cfg.max_len > longest:
        problem = f"the model has only {longest} positions"
        raise InputError(f"max_len={cfg.max_len}: {problem}: give max_len={longest} or less")
    causal.require_causal(net)
    if cfg.pack:
        causal.require_separate_documents(net)


def prepare(cfg: Config, net: Any) -> None:
    """Prepares a model for its training, in place."""
    if cfg.train == "lora":
        causal.add_low_rank(net, cfg.lora_modules, cfg.lora_rank, cfg.lora_alpha / cfg.lora_rank)
    if cfg.recompute:
        if not net.supports_gradient_checkpointing:
            kind = type(net).__name__
            raise InputError(f"recompute=true: {kind} does not support it: leave it out")
        net.gradient_checkpointing_enable({"use_reentrant": False})
    net.train()


def activation_bytes(cfg: Config, net: nn.Module, ranks: int) -> int | None:
    """Bytes of the activations of a rank, which `launch.py check` compares with a GPU's memory.
    None if they cannot be computed without data.
    """
    rows = -(-cfg.global_batch_size // (ranks * cfg.accumulate))
    half = cfg.dtype not in (Dtype.float32, Dtype.tf32)
    is_divided = cfg.strategy == "fsdp" and ranks > 1
    size = (rows, cfg.max_len)
    return causal.activation_bytes(net, partial(prepare, cfg), size, half, is_divided)


def make_optimizer(cfg: Config, net: nn.Module) -> torch.optim.Optimizer:
    """AdamW; or Muon for the matrices of the layers, with updates as large as those of AdamW."""
    if cfg.optimizer == "adamw":
        groups = optimisation.decay_groups(net, cfg.weight_decay)
        return torch.optim.AdamW(groups, cfg.lr, fused=True)
    matrices = [p for block in sharding.blocks(net) for p in block.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": others, "betas": (0.9, 0.999), "weight_decay": 0.0}]
    for columns in sorted({p.shape[1] for p in matrices}):
        scale = ADAMW_RMS * columns**0.5
        alike = [p for p in matrices if p.shape[1] == columns]
        decay = cfg.weight_decay / scale
        groups.append({"params": alike, "lr": cfg.lr * scale, "weight_decay": decay})
    return optimizers.MuonAdamW(groups, cfg.lr)


def lr_factor(cfg: Config, steps: int, step: int) -> float:
    """The learning rate of a step as a fraction of its peak: a linear rise, then a cosine to
    zero.
    """
    return optimisation.rise_and_cosine(step, max(1.0, cfg.warmup * steps), steps)


def row_losses(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """The mean loss of each row (B,), in nats per counted token, and the number of these tokens."""
    counted = rows.counted[:, 1:]
    nats = F.cross_entropy(
        logits[:, :-1][counted].float(), rows.tokens[:, 1:][counted], reduction="none"
    )
    weights = counted.sum(1)
    sums = torch.zeros(counted.shape, device=nats.device).masked_scatter(counted, nats).sum(1)
    return sums / weights.clamp(min=1), weights


def main(cfg: Config, run: Run) -> Results:
    world = run.world
    torch.manual_seed(cfg.seed)
    is_made = cfg.dataset == "made"
    training, validation = (
        made_dialogues.made() if is_made else dialogues.open_dialogues(cfg.data_dir)
    )
    size = (cfg.global_batch_size * cfg.max_len, cfg.max_len, cfg.pack)
    batches = TokenBatches(training, *size, cfg.seed, *world.data, validation.digest)
    val_batches = TokenBatches(validation, *size, 0, *world.data)

    def opened(progress: Callable[[object], None]) -> tuple[Any, Any]:
        net, tokenizer = open_model(cfg, training.facts, world.rank)
        if world.rank == 0:
            require_fit(cfg, net)
        return net, tokenizer

    net, tokenizer = world.together("model", opened)
    count = net.get_input_embeddings().num_embeddings
    training, validation = (dialogues.limited(part, count) for part in (training, validation))
    prepare(cfg, net)
    run.say(f"{type(net).__name__}: {models.trained(net)}")
    run.say(f"{len(training):,} examples: {batches.per_epoch} steps per epoch")
    if batches.per_epoch < FEW_STEPS:
        run.say("warning: an epoch has few steps: reduce global_batch_size= or max_len=")
    autocast = optimisation.autocast(run, cfg)
    model = world.parallel(net, cfg, optimisation.lower_dtype(autocast))
    optimizer = make_optimizer(cfg, net)
    steps = loop.total_steps(cfg, batches)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(lr_factor, cfg, steps))

    def losses(model: nn.Module, examples: Any, part: Any) -> tuple[Tensor, Tensor]:
        """The losses and weights of the rows of a part. A part may have no rows. The model then
        computes one row of padding, which does not count: each rank must run each forward pass.
        """
        length = cfg.max_len if cfg.compile else 0
        rows = Rows(*(t.to(world.device) for t in collate(examples, part.rows, length)))
        # without positions, a row is one example, and the causal mask suffices
        positions = rows.positions if cfg.pack else None
        with autocast:
            logits = model(rows.tokens, position_ids=positions, use_cache=False).logits
        means, weights = row_losses(logits, rows)
        return means[: len(part.indices)], weights[: len(part.indices)]

    def answers(net: nn.Module) -> scores.Pairs:
        """Nats and counted tokens of this rank's parts of the validation set."""
        for part in val_batches.epoch(0):
            means, weights = losses(net, validation, part)
            yield (means.double() * weights).sum(), weights.sum()

    def evaluate() -> dict[str, float]:
        nats, tokens = scores.sums(run, answers, in_step=True)
        return {"val_loss": nats / max(1.0, tokens), "val_tokens": int(tokens)}

    if run.dry_run:
        run.activation_bytes = activation_bytes(cfg, net, run.ranks)
    about = {"kind": training.facts["kind"]}
    run.resume(checkpoint.State(net, optimizer, scheduler, about=about), batches)
    if world.rank == 0 and not cfg.evaluate:
        causal.keep(run.dir, net, tokenizer, cfg.model if cfg.allow_code else "")
    for step in loop.steps(run, cfg, model, batches, evaluate):
        for part in step.parts:
            step.backward(*losses(model, training, part))
        optimizer.step()
        scheduler.step()
    return run.results


if START:
    session.run(main, START)
