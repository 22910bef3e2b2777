"""GPT: trains a language model on your own text. depth= sets the size: width, rates, batch and
tokens follow by the rules in conf/gpt.py.

    python -m recipes.prepare text source=/data/articles data_dir=/data tokenizer=gpt2
    # a text that is made in memory
    python launch.py recipe=gpt launcher=local ranks_per_node=2 device=cpu dataset=bytes
    sbatch sbatch/gpt_1x8.sh data_dir=/data depth=12 compile=true
    # text of a trained model
    python -m recipes.gpt run_dir=runs/gpt/1234 evaluate=true sample=200 prompt="The king"

Measured with dataset=bytes on two CPU cores (1 seed): val_bpb 0.747 after 484 steps, and 0.776
after 150. After 150 steps without rotary positions: 1.36; without the causal mask, a deliberate
bug: 0.01. H100, depth=12, earlier code: 322,000 tokens/s; compiled 602,000.
"""

from recipes.core.run import entry

# This must run before torch is imported: it sets variables from keys and env files, and torch reads
# some of them at import.
START = entry.begin("gpt") if __name__ == "__main__" else None

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.conf.gpt import HEAD, Config
from recipes.core import errors
from recipes.core.data import sampling, sentences, text
from recipes.core.train import checkpoint, loop, optimisation, optimizers, scores, session, sharding
from recipes.core.train.run import Results, Run

# sequences; the same on any number of ranks, so that their losses are equal to the bit
EVAL_BATCH = 16
ROTARY_BASE = 10_000.0


def rotary_factors(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (T, 1, HEAD) of rotary positions (Su et al., 2021): the angles of
    pairs of columns grow with the position.
    """
    frequencies = ROTARY_BASE ** -(torch.arange(HEAD // 2, device=device) / (HEAD // 2))
    angles = torch.arange(length, device=device)[:, None, None] * frequencies
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([sin, -sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of columns of x (B, T, heads, HEAD) by the angles of `rotary_factors`."""
    return torch.addcmul(x * cos.to(x.dtype), x.roll(HEAD // 2, -1), sin.to(x.dtype))


class Attention(nn.Module):
    """Causal attention. Queries and keys are normalised, which bounds their products. Groups of
    queries share keys and values.
    """

    def __init__(self, width: int, kv_heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * HEAD, bias=False)
        self.value = nn.Linear(width, kv_heads * HEAD, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # The three matrices are separate, since Muon treats each by itself. One product with all of
        # them is faster than three.
        together = torch.cat([layer.weight for layer in (self.query, self.key, self.value)])
        heads, shared = (layer.out_features // HEAD for layer in (self.query, self.key))
        qkv = F.linear(x, together).unflatten(-1, (-1, HEAD))
        qk, v = qkv.split([heads + shared, shared], 2)
        qk = F.rms_norm(rotate(qk, cos, sin), (HEAD,))
        q, k = qk.split([heads, shared], 2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads > shared)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, and an MLP whose activation is a squared ReLU (So et al., 2021)."""

    def __init__(self, width: int, kv_heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, kv_heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(F.rms_norm(x, x.shape[-1:]), cos, sin)
        hidden = self.up(F.rms_norm(x, x.shape[-1:])).relu()
        return x + self.down(hidden * hidden)  # not square(), which autocast computes in float32


class GPT(nn.Module):
    """The head has its own weights. It, and the last matrix of each attention and MLP, start at
    zero: each block starts as identity.
    """

    def __init__(self, vocabulary: int, depth: int, width: int, kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, kv_heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(weight)
            elif weight is not self.embed.weight:  # an embedding has variance 1, as torch makes it
                nn.init.normal_(weight, std=width**-0.5)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits of the tokens that follow ``tokens`` (B, T): float32 (B, T, vocabulary)."""
        x = self.embed(tokens)
        cos, sin = rotary_factors(tokens.shape[1], tokens.device)
        x = F.rms_norm(x, x.shape[-1:])
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(F.rms_norm(x, x.shape[-1:])).float()

    def forward(self, sequences: Tensor) -> Tensor:
        """The loss of each of ``sequences`` (B, T + 1): nats, the mean over the T tokens after the
        first one.
        """
        targets = sequences[:, 1:]
        logits = self.logits(sequences[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(1)


@torch.inference_mode()
def generate(
    net: GPT, tokens: Tensor, count: int, context: int, vocabulary: int, seed: int = 0
) -> Tensor:
    """``tokens`` (T,) and ``count`` more, each drawn by the model from the last ``context`` ones.
    Its cost grows as count * context.
    """
    random = torch.Generator(tokens.device).manual_seed(seed)
    for _ in range(count):
        logits = net.logits(tokens[None, -context:])[0, -1, :vocabulary]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(0), 1, generator=random)])
    return tokens


def make_optimizer(cfg: Config, net: GPT) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, AdamW without weight decay for the embedding and the
    head.
    """
    adam = {"betas": (0.8, 0.95), "weight_decay": 0.0}
    others = [(net.embed, cfg.embed_lr), (net.head, cfg.head_lr)]
    groups = [{"params": list(layer.parameters()), "lr": lr, **adam} for layer, lr in others]
    return optimizers.MuonAdamW(
        [{"params": list(net.blocks.parameters())}, *groups], cfg.lr, cfg.momentum, cfg.weight_decay
    )


def lr_factor(cfg: Config, steps: int, step: int) -> float:
    """The learning rate of a step as a fraction of its peak: a linear rise, a constant part, and a
    linear fall to zero.
    """
    rise = (step + 1) / (cfg.warmup * steps + 1)
    fall = (steps - step) / max(1.0, cfg.cooldown * steps)
    return min(1.0, rise, fall)


def main(cfg: Config, run: Run) -> Results:
    world = run.world
    torch.manual_seed(cfg.seed)
    data = sentences.made() if cfg.dataset == "bytes" else text.open_text(cfg.data_dir)
    training, validation = data.split(cfg.seq_len)
    batches = sampling.GlobalBatches(
        len(training), cfg.global_batch_size, cfg.seed, *world.data, data.digest
    )
    vocabulary = -(-len(data.vocabulary) // 64) * 64  # for fast matrix products
    net = GPT(vocabulary, cfg.depth, cfg.width, cfg.kv_heads)
    autocast = optimisation.autocast(run, cfg)
    model = world.parallel(net, cfg, optimisation.lower_dtype(autocast))
    optimizer = make_optimizer(cfg, net)
    steps = loop.total_steps(cfg, batches)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(lr_factor, cfg, steps))
    size = sum(p.numel() for p in net.parameters())
    per_step = cfg.global_batch_size * cfg.seq_len
    work = f"{steps} steps of {per_step:,} tokens"
    run.say(f"{size:,} parameters; {work}; the text has {len(data):,} tokens")

    def sequences(indices: Tensor) -> Tensor:
        tokens = torch.from_numpy(data.take(indices.tolist(), cfg.seq_len))
        return tokens.to(world.device, non_blocking=True)

    lengths = torch.tensor([len(token) for token in data.vocabulary], device=world.device)

    def answers(net: nn.Module) -> scores.Pairs:
        """Nats and bytes of text of this rank's part of the validation set."""
        parts = torch.tensor(validation).split(EVAL_BATCH)
        for indices in parts[sampling.share(len(parts), *world.data)]:
            tokens = sequences(indices)
            with autocast:
                losses = net(tokens)
            nats = losses.double().sum() * cfg.seq_len
            size = lengths[tokens[:, 1:]].sum()
            yield nats, size.double()

    def evaluate() -> dict[str, float]:
        """``val_bpb``: bits per byte of text, which do not depend on the tokenizer; ``val_loss``:
        nats per token.
        """
        nats, size = scores.sums(run, answers)
        return {
            "val_bpb": nats / math.log(2) / max(1.0, size),
            "val_loss": nats / len(validation) / cfg.seq_len,
        }

    run.resume(checkpoint.State(net, optimizer, scheduler), batches)
    for step in loop.steps(run, cfg, model, batches, evaluate):
        for part in step.parts:
            with autocast:
                losses = model(sequences(part.indices))
            step.backward(losses)
        optimizer.step()
        scheduler.step()
    if cfg.sample and not run.stopping:
        with sharding.unsharded(net), autocast:  # all ranks generate the same, so that none waits
            first = torch.tensor([data.end, *data.encode(cfg.prompt)], device=world.device)
            tokens = generate(net, first, cfg.sample, cfg.seq_len, len(data.vocabulary), cfg.seed)
        longest = len(cfg.prompt) + 10 * cfg.sample
        run.say(f"sample: {errors.shown(data.decode(tokens.tolist()), longest)}")
    return run.results


if START:
    session.run(main, START)
