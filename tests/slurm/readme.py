"""The commands of the documentation and of the recipes' headers, and how test_readme.py runs each
of them.

A command is a line of a block marked ```sh, or a line after ``$ `` in a block marked ```console,
where its output follows (… stands for any text). Other blocks are only shown; a block marked
```python that begins with ``# PATH`` is a file that the commands use. In a header a command is an
indented line that begins with a program. Each command needs an entry in TABLE.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.helpers import ROOT

PAGES = (
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "env/README.md",
)
SHOWN_ONLY = ("text", "yaml", "python", "diff")
PROGRAMS = (
    "python",
    "python3",
    "torchrun",
    "srun",
    "sbatch",
    "salloc",
    "accelerate",
    "mpirun",
    "make",
    "sudo",
)

# --- the commands
# ------------------------------------------------------------------------------------------------

_CODE = re.compile(r"""(?:'[^']*'|"[^"]*"|(?<=\S)#|[^'"#])*""")  # up to a comment


def uncommented(text: str) -> list[str]:
    """The commands of a piece of shell, one line each: without comments, continued lines joined."""
    commands = []
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        code = _CODE.match(line)
        assert code, "it matches anything"
        assert line[code.end() :][:1] in ("", "#"), f"a quote has no end: {line}"
        commands += [code[0].rstrip()] if code[0].strip() else []
    return commands


def fenced(text: str) -> dict[str, str]:
    """The commands of a Markdown file, and the output that is shown for each. Raises AssertionError
    for a block without a mark.
    """
    commands: dict[str, str] = {}
    blocks = re.findall(r"^```(.*)\n((?:(?!```).*\n)*)```$", text, re.MULTILINE)
    assert text.count("```") == 2 * len(blocks), (
        "a block does not begin and end at the beginning of a line"
    )
    for mark, block in blocks:
        if mark == "sh":
            commands |= dict.fromkeys(uncommented(block), "")
        elif mark == "console":
            before, *prompts = re.split(r"^\$ ", block, flags=re.MULTILINE)
            assert not before, f"a block marked console does not begin with $: {before}"
            commands |= {
                line: said for line, _, said in (prompt.partition("\n") for prompt in prompts)
            }
        else:
            assert mark in SHOWN_ONLY, (
                f"a block is marked {mark!r}, not sh, console, {', '.join(SHOWN_ONLY)}: {block}"
            )
            hidden = [
                line
                for line in block.splitlines()
                if line.removeprefix("$ ").split(" ")[0] in PROGRAMS
            ]
            assert not hidden, (
                f"a command stands in a block marked {mark}, which is not run: {hidden}"
            )
    return commands


def of_header(source: str) -> dict[str, str]:
    """The commands of a module's docstring: its indented lines that begin with a program."""
    doc = ast.get_docstring(ast.parse(source), clean=False) or ""
    indented = "".join(f"{line.strip()}\n" for line in doc.splitlines() if line.startswith("    "))
    return {line: "" for line in uncommented(indented) if line.split()[0] in PROGRAMS}


def files(text: str) -> dict[str, str]:
    """The files that a Markdown file shows, by their paths in the repository."""
    return dict(re.findall(r"^```python\n(?=# (\S+)\n)((?:(?!```).*\n)*)```$", text, re.MULTILINE))


def differences(text: str) -> list[tuple[str, str]]:
    """The file before and after each block marked ```diff."""
    pairs = []
    for block in re.findall(r"^```diff\n((?:(?!```).*\n)*)```$", text, re.MULTILINE):
        lines = [(line[:1].strip(), f"{line[1:]}\n") for line in block.splitlines()]
        before, after = ("".join(line for mark, line in lines if mark != other) for other in "+-")
        pairs.append((before, after))
    return pairs


def shown_files() -> dict[str, str]:
    """The files that the commands use, by their paths in the repository."""
    page = (ROOT / "docs/your-script.md").read_text()
    recipe = {"recipes/points.py": differences(page)[0][1]}
    return {**files((ROOT / "docs/new-recipe.md").read_text()), **files(page), **recipe}


@functools.cache  # several threads call it, and ast.parse of Python 3.11 is not safe there
def commands() -> dict[str, str]:
    """All commands, and the output that is shown for each."""
    outputs: dict[str, str] = {}
    for page in PAGES:
        outputs = fenced(page.read_text()) | outputs
    for path in sorted((ROOT / "recipes").glob("*.py")):
        outputs = of_header(path.read_text()) | outputs
    return outputs


# --- how each is run
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class How:
    """What is typed for a command in a test, and what is expected of it.

    add: words at its end. swap: pieces of it, each of which occurs once, and their replacements. Of
    the shell's variables $DATA has MNIST, CIFAR-10 and ImageNet, tiny; $PACKED is a packed copy;
    $NEW is an empty folder. within: the line is typed in this ``salloc …``, or is a script for this
    ``sbatch …``. runs: the number of runs that it makes, each to its end. says: a pattern in its
    output. only: why another command is typed in its place, with ``swap``.
    """

    where: str
    add: str = ""
    swap: Mapping[str, str] = field(default_factory=dict)
    within: str = ""
    runs: int = 1
    status: int = 0
    says: str = ""
    only: str = ""


HERE = "this machine"
SLURM = "Slurm"
BY_HAND = "two machines by hand"
OWN_SLURM = "a Slurm of one's own"
here = functools.partial(How, HERE)
tool = functools.partial(How, HERE, runs=0)
slurm, by_hand, own_slurm = (functools.partial(How, where) for where in (SLURM, BY_HAND, OWN_SLURM))

FEW = "device=cpu max_steps=2"
CIFAR = f"{FEW} arch=airbench94 global_batch_size=16"
PHOTOS = (
    f"{FEW} arch=resnet18 px=32 small_px=0 val_px=32 val_resize=36 num_workers=1 "
    "global_batch_size=16"
)
FRAMEWORK = {"gpus_per_node=8": "gpus_per_node=1 device=cpu"}  # the user's own script
# a rank a node: there are two cores
ONE_EACH = {"sbatch sbatch": "sbatch --ntasks-per-node=1 sbatch"}
STAGED = {
    "sbatch sbatch": "TMPDIR=$NEW sbatch --ntasks-per-node=1 sbatch",
    "/scratch/imagenet-256": "$PACKED",
}
TUNED = (
    f"{FEW} arch=shufflenet_v2_x0_5 pretrained=false px=32 val_resize=32 num_workers=1 "
    "global_batch_size=8"
)
DATA = {"=/data": "=$DATA"}
QWEN = {"Qwen/Qwen3-0.6B": "$MODEL"}
NEW = {"data_dir=/data": "data_dir=$NEW"}
ARTICLES = {"/data/articles": "tested-versions.txt", "data_dir=/data": "data_dir=$NEW"}
# a tokenizer, and a file of dialogues
MADE = (
    "python -c 'from recipes.core.data import made_dialogues as made; "
    "made.made_tokenizer().save_pretrained(\"'$NEW'/model\")' && "
    """printf '{"text": "%s"}\\n' one two > $NEW/rows.jsonl && python"""
)
TALKS = {
    "python": MADE,
    "/data/talks": "$NEW/rows.jsonl",
    "/models/qwen": "$NEW/model",
    "data_dir=/data": "data_dir=$NEW",
}
PACK = {"/data/imagenet": "$DATA", "/scratch": "$NEW"}
BENCH = {"--ntasks-per-node=8": "--ntasks-per-node=1", "1M..1G": "1K..4K"}
# In place of Apptainer, pyxis and Docker: each notes that it was called, and starts the command
# after the image.
STAND_INS = "PATH=$IMAGES:$PATH"
SHOWN = {"make": "make -n"}
NEXT = "^next: python launch.py recipe="

TABLE: dict[str, How] = {
    # CONTRIBUTING.md
    "make install": tool(),
    "make check": tool(
        swap=SHOWN,
        says="python -m tests.tables check",
        only="it takes a minute, and continuous integration runs it",
    ),
    "make test": tool(
        swap=SHOWN, says="pytest -n 4 .*-m .not long", only="it runs all tests, for minutes"
    ),
    "make alltests": tool(
        swap=SHOWN, says="pytest -n 4 --dist loadfile", only="it runs all tests, for an hour"
    ),
    "make faults": tool(
        swap=SHOWN, says="pytest tests/faults -n 4", only="it runs other tests, for minutes"
    ),
    "make mutants ONLY=config": tool(
        swap=SHOWN,
        says="tests.mutations workers=4 only=config",
        only="it runs other tests, for minutes",
    ),
    "make bench ONLY=checkpoint": tool(
        swap=SHOWN,
        says="tests.benchmarks +only=checkpoint",
        only="a target can be missed on a busy machine",
    ),
    "make gpu OUT=gpu.json": tool(swap=SHOWN, says="-m tests.gpu gpu.json", only="it needs a GPU"),
    "make portability": tool(
        swap=SHOWN, says="tests/portability.py --workers 4", only="it installs three systems"
    ),
    "make docs": tool(),
    # README.md
    "make demo": here(says=r"^test accuracy 9\d\.\d\d% on 359 digits; run directory runs/demo$"),
    "sbatch sbatch/mnist_2x8.sh data_dir=/data run_dir=runs/first": slurm(
        FEW, {**ONE_EACH, **DATA}
    ),
    "python launch.py recipe=mnist epoch=3": tool(status=2),
    "export SBATCH_PARTITION=gpu SBATCH_ACCOUNT=acct": tool(),
    "python -m recipes.prepare mnist data_dir=$HOME/data": tool(
        "source=$DATA", {"=$HOME/data": "=$NEW"}, says=NEXT
    ),
    "sbatch sbatch/mnist_1x1.sh data_dir=$HOME/data": slurm(FEW, {"=$HOME/data": "=$DATA"}),
    # docs/large-models.md
    "python launch.py recipe=imagenet nodes=2 gpus_per_node=8 strategy=fsdp shard_size=8 "
    "data_dir=/data": slurm(
        f"{PHOTOS} variant=dev dataset=fake ema=0",
        {
            "gpus_per_node=8": "gpus_per_node=1",
            "shard_size=8": "shard_size=2",
            " data_dir=/data": "",
        },
    ),
    "python launch.py check recipe=gpt depth=24 nodes=2 gpus_per_node=8 gpu_memory_gb=80 "
    "strategy=fsdp data_dir=/data": slurm(
        "dataset=bytes seq_len=16",
        {"depth=24": "depth=2", "gpus_per_node=8": "gpus_per_node=1"},
        runs=0,
        says="^memory: ok: ",
    ),
    # docs/administrators.md
    "scontrol show config | grep -E "
    "'JobRequeue|KillWait|SelectType|PreemptMode|SlurmdTimeout|ProctrackType'": slurm(
        runs=0, says="^KillWait"
    ),
    # docs/submitting.md
    "sbatch sbatch/mnist_2x8.sh data_dir=/data": slurm(FEW, {**ONE_EACH, **DATA}),
    "sbatch -p gpu -A acct sbatch/mnist_2x8.sh epochs=2": slurm(
        "device=cpu", {"sbatch -p": "sbatch --ntasks-per-node=1 -p"}
    ),
    "sbatch --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 sbatch/mnist_2x8.sh": slurm(
        FEW, {"--nodes=4": "--nodes=2", "--ntasks-per-node=4": "--ntasks-per-node=1"}
    ),
    "sbatch --gpus-per-node=0 sbatch/mnist_2x8.sh device=cpu": slurm(
        "max_steps=2", {"sbatch --gpus": "sbatch --ntasks-per-node=1 --gpus"}
    ),
    "python launch.py recipe=mnist nodes=2": slurm(FEW),
    "python launch.py recipe=mnist nodes=2 gpus_per_node=8 data_dir=/data partition=gpu "
    "account=acct time=2:00:00": slurm(FEW, {"gpus_per_node=8": "gpus_per_node=1", **DATA}),
    "python launch.py recipe=mnist nodes=2 gpus_per_node=2 device=cpu wait=true": slurm(
        "max_steps=2",
        {"gpus_per_node=2": "gpus_per_node=1"},
        says=r"^job \d+: completed; run directory ",
    ),
    "python launch.py recipe=mnist gpus=10": slurm(FEW, {"gpus=10": "gpus=2"}),
    "python launch.py recipe=mnist nodes=2 launcher=print": tool(says="^#SBATCH --nodes=2$"),
    "python launch.py recipe=cifar sweep.lr=0.1,0.2,0.4 sweep.seed=1,2 parallel=3 "
    "data_dir=/data": slurm(
        CIFAR, {**DATA, "seed=1,2": "seed=1"}, runs=3, says=r"^\d+_2: lr=0.4 seed=1$"
    ),
    "python -m recipes.report runs/cifar": tool(says="^runs/cifar/1234_1 +done +1 "),
    "srun -N1 --ntasks-per-node=2 --gpus-per-node=2 python -m recipes.mnist epochs=1": slurm(
        "device=cpu"
    ),
    "python launch.py recipe=mnist launcher=local gpus_per_node=2": here(FEW),
    "python launch.py recipe=mnist launcher=local ranks_per_node=2 device=cpu": here("max_steps=2"),
    "python launch.py recipe=mnist launcher=local gpus=8,2 node_rank=0 master=hostA:29400": by_hand(
        FEW, {"gpus=8,2": "gpus=1,1", "hostA": "node1"}
    ),
    "torchrun --nproc-per-node=2 -m recipes.mnist epochs=1": here(),
    "python -m recipes.mnist epochs=1": here(),
    "python launch.py recipe=toy launcher=local ranks_per_node=2 device=cpu": here(
        "max_steps=20", says="^toy: 2 ranks on 1 node"
    ),
    "python launch.py check recipe=mnist nodes=2 gpus_per_node=8 data_dir=/data": slurm(
        "device=cpu", DATA, runs=0, says="^nothing was submitted$"
    ),
    "tar -cf /shared/environment.tar -C .venv .": tool(swap={"/shared": "$NEW"}),
    "sbatch sbatch/cifar_2x8.sh environment=/shared/environment.tar": slurm(
        CIFAR,
        {
            "sbatch sbatch": "TMPDIR=$NEW sbatch --nodes=1 --ntasks-per-node=1 sbatch",
            "/shared/": "",
        },
    ),
    # docs/your-script.md
    "python launch.py script=ddp.py nodes=2 gpus_per_node=8 -- --epochs 20": slurm(
        swap={"gpus_per_node=8": "gpus_per_node=1 device=cpu", "20": "2"}
    ),
    "python launch.py script=single.py nodes=1 gpus_per_node=1": slurm("device=cpu"),
    "python launch.py script=single.py nodes=1 gpus_per_node=1 -- --epochs 20000": slurm(
        swap={"gpus_per_node=1": "gpus_per_node=1 device=cpu", "20000": "2"}
    ),
    "python launch.py script=ddp.py nodes=2 gpus_per_node=8 -- --epochs 20000": slurm(
        swap={"gpus_per_node=8": "gpus_per_node=1 device=cpu", "20000": "2"}
    ),
    "python launch.py check script=ddp.py nodes=2 gpus_per_node=8 -- --epochs 20": slurm(
        swap={"gpus_per_node=8": "gpus_per_node=1 device=cpu"},
        runs=0,
        says="^script: not checked: launch.py check does not start .*/ddp.py$",
    ),
    "python launch.py script=ddp.py nodes=2 ranks_per_node=2 device=cpu": slurm(),
    "python launch.py script=ddp.py launcher=local ranks_per_node=2 device=cpu": here(
        says="^epoch 10  loss 0.0"
    ),
    "sbatch sbatch/script_2x8.sh script=ddp.py -- --epochs 20": slurm(
        swap={**ONE_EACH, "script=": "device=cpu script=", "20": "2"}
    ),
    "python launch.py script=logged.py launcher=local ranks_per_node=2 device=cpu "
    "run_dir=runs/logged && python launch.py runs runs/logged": here(
        says=r"^runs/logged +done +100/100 +0\.0000 "
    ),
    "python -m recipes.report runs/logged html=runs.html": tool(
        swap={"logged": "cifar"}, says=r"^runs.html: \d runs$"
    ),
    "python launch.py script=hf.py nodes=2 gpus_per_node=8 -- 20000": slurm(
        swap=FRAMEWORK | {"20000": "20"}
    ),
    "python launch.py script=lit.py nodes=2 gpus_per_node=8 -- 100000": slurm(
        swap=FRAMEWORK | {"100000": "20"}
    ),
    "python launch.py script=acc.py nodes=2 gpus_per_node=8 -- 100000": slurm(
        swap=FRAMEWORK | {"100000": "20"}
    ),
    "python launch.py script=ddp.py nodes=2 gpus_per_node=8 silent_s=1800 restart_on_hang=true "
    "-- --epochs 20": slurm(swap={"gpus_per_node=8": "gpus_per_node=1 device=cpu", "20": "2"}),
    "python launch.py script=ddp.py nodes=2 gpus_per_node=8 through=torchrun -- --epochs 20": slurm(
        swap=FRAMEWORK | {"20": "2"}
    ),
    "sbatch --ntasks-per-node=1 --cpus-per-task=64 sbatch/script_2x8.sh script=ddp.py "
    "through=torchrun -- --epochs 20": slurm(
        swap={
            "--cpus-per-task=64": "--cpus-per-task=1",
            " script=": " device=cpu script=",
            "20": "2",
        }
    ),
    "sbatch --signal=B:USR2@300 sbatch/script_2x8.sh script=ddp.py stop_before_s=300 -- "
    "--epochs 20": slurm(
        swap={
            "sbatch --signal": "sbatch --ntasks-per-node=1 --signal",
            " script=": " device=cpu script=",
            "epochs 20": "epochs 2",
        }
    ),
    "python launch.py recipe=points launcher=local ranks_per_node=2 device=cpu": here(
        says="^points: 2 ranks on 1 node"
    ),
    # docs/coming-from.md
    "torchrun --nproc-per-node=8 -m recipes.mnist": here(
        FEW, {"node=8": "node=2"}, says="^mnist: 2 ranks"
    ),
    "torchrun --nproc-per-node=8 --max-restarts=1 -m recipes.mnist run_dir=runs/mine": here(
        FEW, {"node=8": "node=2"}, says="^mnist: 2 ranks"
    ),
    "python -m torch.distributed.launch --nproc-per-node=8 -m recipes.mnist": here(
        FEW, {"node=8": "node=2"}, says="^mnist: 2 ranks"
    ),
    "accelerate launch --multi_gpu --num_processes=8 -m recipes.mnist": here(
        FEW, {"=8": "=2"}, says="^mnist: 2 ranks"
    ),
    "mpirun -np 8 python -m recipes.mnist": here(FEW, {"-np 8": "-np 2"}, says="^mnist: 2 ranks"),
    # docs/containers.md
    "python launch.py recipe=mnist nodes=2 container=/images/recipes.sif data_dir=/data": slurm(
        FEW,
        {
            "python launch": f"{STAND_INS} python launch",
            "/images/recipes.sif": "$IMAGES/recipes.sif",
            **DATA,
        },
    ),
    "python launch.py recipe=mnist nodes=2 container=/images/recipes.sqsh data_dir=/data": slurm(
        FEW,
        {
            "python launch": f"{STAND_INS} python launch",
            "/images/recipes.sqsh": "$IMAGES/recipes.sqsh",
            **DATA,
        },
    ),
    "RECIPES_CONTAINER=/images/recipes.sif sbatch sbatch/mnist_2x8.sh data_dir=/data": slurm(
        FEW,
        {"RECIPES_CONTAINER=/images": f"{STAND_INS} RECIPES_CONTAINER=$IMAGES", **ONE_EACH, **DATA},
    ),
    "docker build --tag recipes --file env/Dockerfile .": tool(
        swap={"docker build --tag recipes --file": "ls -d"},
        says="^env/Dockerfile$",
        only="there is no registry to take the base from",
    ),
    'docker run --rm --gpus=all --ipc=host --network=host --ulimit=memlock=-1 -v "$PWD:$PWD" '
    '-w "$PWD" -v /data:/data recipes '
    "python3 launch.py recipe=mnist launcher=local gpus=8,8 node_rank=0 master=hostA:29400 "
    "data_dir=/data": by_hand(
        FEW,
        {"docker run": f"{STAND_INS} docker run", "gpus=8,8": "gpus=1,1", "hostA": "node1", **DATA},
    ),
    "python launch.py check recipe=imagenet nodes=2 data_dir=/data": slurm(
        PHOTOS, DATA, runs=0, says="^nothing was submitted$"
    ),
    # docs/coming-from.md, in an allocation
    "srun --ntasks-per-node=1 sh -c 'torchrun --nnodes=2 --nproc-per-node=8 "
    "--rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d "
    "--rdzv-endpoint=node1:29400 --rdzv-conf=is_host=$((SLURM_NODEID == 0)) "
    "-m recipes.mnist'": slurm(
        swap={"--nproc-per-node=8": "--nproc-per-node=1", "recipes.mnist": f"recipes.mnist {FEW}"},
        within="salloc -N2",
        says="^mnist: 2 ranks on 2 nodes",
    ),
    "srun --ntasks-per-node=1 sh -c 'accelerate launch --multi_gpu --num_machines=2 "
    "--num_processes=16 "
    "--machine_rank=$SLURM_NODEID --main_process_ip=node1 --main_process_port=29500 -m "
    "recipes.mnist'": slurm(
        swap={"--num_processes=16": "--num_processes=2", "recipes.mnist": f"recipes.mnist {FEW}"},
        within="salloc -N2",
        says="^mnist: 2 ranks on 2 nodes",
    ),
    "MASTER_ADDR=$(hostname) mpirun -x MASTER_ADDR -np 16 python -m recipes.mnist": slurm(
        FEW, {"-np 16": "-np 2"}, within="sbatch -N2 --ntasks-per-node=1"
    ),
    # docs/data.md
    "python -m recipes.prepare mnist data_dir=/data": tool("source=$DATA", NEW, says=NEXT),
    "python -m recipes.prepare mnist data_dir=/data source=/media/usb/mnist": tool(
        swap={**NEW, "/media/usb/mnist": "$DATA/MNIST/raw"}, says=NEXT
    ),
    "python -m recipes.prepare cifar10 data_dir=/data": tool("source=$DATA", NEW, says=NEXT),
    "python -m recipes.prepare imagenet source=/data/imagenet data_dir=/scratch/imagenet-256": tool(
        swap=PACK, says=NEXT
    ),
    "sbatch sbatch/imagenet_2x8.sh data_dir=/scratch/imagenet-256 decoder=opencv "
    "stage_dir='$TMPDIR'": slurm(PHOTOS, STAGED),
    "python -m recipes.prepare text source=/data/articles data_dir=/data": tool(
        swap=ARTICLES, says=NEXT
    ),
    "python -m recipes.prepare text source=/data/articles data_dir=/data tokenizer=gpt2": tool(
        swap={**ARTICLES, "gpt2": "bytes"}, says=NEXT, only="the tokenizer is downloaded"
    ),
    "python -m recipes.prepare dialogues source=/data/talks model=/models/qwen "
    "data_dir=/data": tool("workers=1", TALKS, says=NEXT),
    # AGENTS.md
    "python launch.py check recipe=mnist nodes=2 device=cpu": slurm(
        "dataset=fake", runs=0, says="^nothing was submitted$"
    ),
    "python launch.py check recipe=mnist nodes=2 device=cpu --json": slurm(
        "dataset=fake", runs=0, says='^{"parts": .*"exit_status": 0}$'
    ),
    # docs/tutorial.md
    "python launch.py check recipe=mnist nodes=2 ranks_per_node=2 device=cpu dataset=digits "
    "epochs=40": slurm(
        swap={"ranks_per_node=2": "ranks_per_node=1"}, runs=0, says="^nothing was submitted$"
    ),
    "python launch.py recipe=mnist nodes=2 ranks_per_node=2 device=cpu dataset=digits "
    "epochs=40 time=2:00:00": slurm(
        swap={"ranks_per_node=2": "ranks_per_node=1", "epochs=40": "max_steps=2"}
    ),
    "python launch.py logs last": tool(
        swap={"last": "runs/cifar/1234_0"}, says="^cifar: 1 rank on 1 node"
    ),
    "python -m recipes.report runs/mnist html=runs.html": tool(
        swap={"runs/mnist": "runs/cifar"}, says=r"^runs.html: \d runs$"
    ),
    "python -m recipes.doctor explain runs/mnist/1234": tool(
        swap={"mnist": "imagenet"}, says="^rank 0 on .* failed first: "
    ),
    # docs/run-directory.md
    "python launch.py logs 1234": tool(
        swap={"1234": "runs/cifar/1234_0"}, says="^cifar: 1 rank on 1 node"
    ),
    # docs/watching.md
    "python launch.py compare 1234 1235": tool(
        swap={"1234 1235": "runs/cifar/1234_0 runs/cifar/1234_1"},
        says="^curves: python -m recipes.report runs/cifar/1234_0 ",
    ),
    "python -m recipes.mnist dataset=digits profile=10 device=cpu": here(
        "max_steps=16", {"profile=10": "profile=1"}
    ),
    "python launch.py scale recipe=cifar nodes=1,2,4 max_steps=200": slurm(
        f"{CIFAR} dataset=fake",
        {"nodes=1,2,4 max_steps=200": "nodes=1,2"},
        runs=2,
        says="^when these jobs are done, print the table: python launch.py scale ",
    ),
    "python launch.py scale runs/scale/20260101-120000": tool(
        swap={"scale/20260101-120000": "cifar/1234_1"}, says="^ +ranks +nodes "
    ),
    "python launch.py scale 1234 link=runs/collectives/1235 ranks=8,64,512,4096": tool(
        swap={"1234 link=runs/collectives/1235": "1234_1 link=runs/cifar/1234_0"},
        status=2,
        says="has no measured bandwidth and latency of all_reduce",
    ),
    "python launch.py runs": tool(says="^runs/cifar/1234_1 +done +1/1 "),
    "python launch.py runs --failed --sort=updated": tool(says="^runs/imagenet/1234 +failed "),
    "python launch.py runs --ledger": tool(says="^all "),
    "python launch.py logs 1234 rank=3 follow": tool(
        swap={"1234 rank=3 follow": "runs/cifar/1234_0 rank=0"}, says="^cifar: 1 rank on 1 node"
    ),
    "python launch.py look 1234": tool(
        swap={"1234": "runs/cifar/1234_0"}, status=2, says="is not running: done$"
    ),
    "python launch.py look last": tool(
        swap={"last": "runs/cifar/1234_0"}, status=2, says="is not running: done$"
    ),
    "python launch.py cancel 1234": tool(
        swap={"1234": "runs/cifar/1234_0"}, says="is not running: done$"
    ),
    "python launch.py resume last epochs=60": tool(
        swap={"last": "runs/cifar/1234_0"},
        status=2,
        says="was not submitted to Slurm: start it again with: python -m recipes.cifar",
    ),
    "python launch.py resume 1234 epochs=20": tool(
        swap={"1234": "runs/cifar/1234_0"},
        status=2,
        says="was not submitted to Slurm: start it again with: python -m recipes.cifar",
    ),
    # docs/fine-tuning.md, recipes/finetune.py
    "python -m recipes.prepare finetune data_dir=/data/birds arch=resnet50": tool(
        swap={"python": "PYTHONPATH=$WEIGHTS TORCH_HOME=$NEW python", "/data/birds": "$DATA/train"},
        says=NEXT,
    ),
    "python launch.py check recipe=finetune data_dir=/data/birds gpus_per_node=4": slurm(
        TUNED,
        {"/data/birds": "$DATA/train", "gpus_per_node=4": "gpus_per_node=1"},
        runs=0,
        says="^nothing was submitted$",
    ),
    "sbatch sbatch/finetune_1x4.sh data_dir=/data/birds best_metric=val_f1": slurm(
        TUNED, {**ONE_EACH, "/data/birds": "$DATA/train"}
    ),
    "python -m recipes.predict runs/finetune/1234 photo.jpg": tool(
        says=r"^photo\.jpg  class [0-2] 0\.\d+  class "
    ),
    "python -m recipes.predict runs/finetune/1234 photos --csv out.csv": tool(
        swap={" photos": " $DATA/val"}
    ),
    "python -m recipes.predict runs/finetune/1234 photos --json": tool(
        swap={" photos": " $DATA/val"}, says='^{"file": '
    ),
    "python -m recipes.export runs/finetune/1234 onnx": tool(says="its outputs are within"),
    "python -m recipes.export runs/finetune/1234 safetensors": tool(
        says="^runs/finetune/1234/model.safetensors: from "
    ),
    "python launch.py new birds from=finetune": tool(says="^sbatch/birds_1x4.sh$"),
    "python launch.py recipe=finetune launcher=local ranks_per_node=2 device=cpu "
    "dataset=fake": here("max_steps=2 num_workers=1"),
    "python -m recipes.prepare finetune data_dir=IMAGES arch=resnet50": tool(
        swap={"python": "PYTHONPATH=$WEIGHTS TORCH_HOME=$NEW python", "IMAGES": "$DATA/train"},
        says=NEXT,
    ),
    "python -m recipes.prepare weights arch=resnet50": tool(
        swap={"python": "PYTHONPATH=$WEIGHTS TORCH_HOME=$NEW python"}, says=NEXT
    ),
    # docs/llm.md
    "python -m recipes.prepare weights model=Qwen/Qwen3-0.6B": tool(
        swap={"python": "HF_HUB_OFFLINE=1 HF_HOME=$NEW python"},
        status=3,
        says="run this command on a machine with internet, and copy its folder",
        only="the model is downloaded",
    ),
    "python -m recipes.prepare dialogues source=chats.jsonl data_dir=/data "
    "model=Qwen/Qwen3-0.6B": tool(
        "workers=1", {**QWEN, "data_dir=/data": "data_dir=$NEW"}, says=NEXT
    ),
    "python launch.py check recipe=llm gpus_per_node=8 data_dir=/data model=Qwen/Qwen3-0.6B": slurm(
        "dataset=made",
        {**QWEN, "gpus_per_node=8": "gpus_per_node=1"},
        runs=0,
        says="^nothing was submitted$",
    ),
    "sbatch sbatch/llm_1x8.sh data_dir=/data model=Qwen/Qwen3-0.6B": slurm(
        f"{FEW} dataset=made", {**QWEN, **ONE_EACH}
    ),
    'python -m recipes.predict runs/llm/1234 prompt="Who wrote Hamlet?"': tool("max_tokens=5"),
    "python -m recipes.predict runs/llm/1234 prompts=questions.jsonl max_tokens=200": tool(
        swap={"=200": "=5"}, says='^{"messages": '
    ),
    'python -m recipes.predict runs/llm/1234 prompt="Who wrote Hamlet?" max_tokens=100': tool(
        swap={"=100": "=5"}
    ),
    "python -m recipes.predict runs/llm/1234 prompts=questions.jsonl": tool(
        "max_tokens=5", says='^{"messages": '
    ),
    "python -m recipes.export runs/llm/1234 hf": tool("out=$NEW/hf", says="^/.*/hf: from runs/llm"),
    "python -m recipes.export runs/llm/1234 hf out=/models/mine": tool(
        swap={"/models": "$NEW"}, says="^/.*/mine: from runs/llm"
    ),
    "python -m recipes.export runs/llm/1234 hf adapter=true out=/models/adapter": tool(
        swap={"/models": "$NEW"},
        status=2,
        says="the run has no low-rank additions",
        only="the run trained all weights",
    ),
    "python launch.py recipe=llm launcher=local ranks_per_node=2 device=cpu dataset=made": here(
        "max_steps=2"
    ),
    # docs/your-site.md
    'mkdir -p /scratch/$USER/runs && ln -s "$_" runs': tool(
        swap={"/scratch/$USER": "$NEW", '"$_" runs': '"$_" $NEW/link && cd $NEW/link && pwd -P'},
        says="/runs$",
    ),
    "python launch.py recipe=mnist nodes=2 cluster=example launcher=print": tool(
        says="^#SBATCH --partition=gpu$"
    ),
    "python launch.py recipe=mnist nodes=2 cluster=example launcher=print > mnist_2.sh && "
    "sbatch mnist_2.sh epochs=5": slurm(FEW, {"cluster=example ": ""}),  # whose modules no node has
    # docs/doctor.md
    "srun --ntasks-per-node=1 --gpus-per-node=8 python -m recipes.doctor": slurm(
        "device=cpu", within="salloc -N2 --gpus-per-node=8", runs=0, says="^healthy: 2 nodes"
    ),
    "python launch.py recipe=imagenet nodes=4 gpus_per_node=8 doctor=true data_dir=/data": slurm(
        PHOTOS, {"nodes=4": "nodes=2", "gpus_per_node=8": "gpus_per_node=1", **DATA}
    ),
    "python launch.py recipe=imagenet nodes=8 gpus_per_node=8 spare=1 restarts=3 "
    "data_dir=/data": slurm(
        PHOTOS, {"nodes=8": "nodes=1", "gpus_per_node=8": "gpus_per_node=1", **DATA}
    ),
    "python -m recipes.doctor explain runs/imagenet/1234": tool(
        says="^rank 0 on .* failed first: .*data_dir='nowhere' has "
    ),
    "python -m recipes.doctor network=infiniband": tool(says="^healthy: 1 node"),
    "python launch.py recipe=collectives launcher=local ranks_per_node=4 device=cpu": here(),
    "srun -N2 --ntasks-per-node=8 --gpus-per-node=8 python -m recipes.collectives mode=bench "
    "operations=all_reduce "
    "sizes=1M..1G": slurm("device=cpu", BENCH),
    # docs/keys.md, docs/new-recipe.md
    "python -m recipes.mnist --help": tool(says="^  label_smoothing=0.1 "),
    "python launch.py recipe=rings launcher=local ranks_per_node=2 device=cpu": here(
        says="^rings: 2 ranks on 1 node, cpu, gloo$"
    ),
    "python launch.py recipe=words launcher=local ranks_per_node=2 device=cpu": here(
        says=r"^finished at step 40; val_top1 (0\.9|1)"
    ),
    # A Slurm of one's own, in docs/your-site.md
    'eval "$(sudo python3 tests/slurm/cluster.py up --nodes 2 --gpus 8)"': own_slurm(
        "; echo $SLURM_CONF", {"sudo ": ""}, runs=0
    ),
    "sbatch --ntasks-per-node=2 --gpus-per-node=0 sbatch/mnist_2x8.sh device=cpu "
    "dataset=digits": own_slurm("max_steps=2", {"--ntasks-per-node=2": "--ntasks-per-node=1"}),
    "sudo python3 tests/slurm/cluster.py down": own_slurm(
        "$OWN", {"sudo ": ""}, runs=0
    ),  # and nobody else's
    # env/README.md
    "python -c 'from recipes.core.config import envfile; "
    'print(envfile.read("env/clusters/<site>.env"))\'': tool(
        swap={"<site>": "ours"}, says="{'NCCL_IB_DISABLE': '1'}"
    ),
    # The recipes' headers, where they have others
    "python launch.py recipe=cifar launcher=local ranks_per_node=2 device=cpu variant=fast "
    "data_dir=/data": here(CIFAR, DATA),
    "sbatch sbatch/cifar_1x8.sh variant=accurate data_dir=/data": slurm(
        CIFAR, {**ONE_EACH, **DATA}
    ),
    "python launch.py recipe=gpt launcher=local ranks_per_node=2 device=cpu dataset=bytes": here(
        "max_steps=2", says="^sample: "
    ),
    "sbatch sbatch/gpt_1x8.sh data_dir=/data depth=12 compile=true": slurm(
        "device=cpu max_steps=2 dataset=bytes", {**ONE_EACH, "depth=12": "depth=1"}
    ),
    'python -m recipes.gpt run_dir=runs/gpt/1234 evaluate=true sample=200 prompt="The king"': here(
        "device=cpu dataset=bytes depth=1 max_steps=1",
        {" evaluate=true": ""},
        says="^sample: The king",
        only="there is no run",
    ),
    "python -m recipes.doctor": tool(says="^healthy: 1 node"),
    "python -m recipes.doctor network=my.env": tool(says="^healthy: 1 node"),
    "python launch.py recipe=imagenet launcher=local ranks_per_node=2 device=cpu variant=dev": here(
        "max_steps=1"
    ),
    "sbatch sbatch/imagenet_2x8.sh variant=fast data_dir=/scratch/imagenet-256 "
    "stage_dir='$TMPDIR'": slurm(PHOTOS, STAGED),
    "python -m recipes.mnist dataset=digits": here("max_steps=2"),
    "python -m recipes.prepare mnist data_dir=DIR [source=FOLDER]": tool(
        swap={"DIR": "$NEW", "[source=FOLDER]": "source=$DATA"}, says=NEXT
    ),
    "python -m recipes.prepare cifar10 data_dir=DIR [source=FOLDER]": tool(
        swap={"DIR": "$NEW", "[source=FOLDER]": "source=$DATA"}, says=NEXT
    ),
    "python -m recipes.prepare text data_dir=DIR source=FOLDER [tokenizer=gpt2] [workers=N]": tool(
        "workers=1",
        {"DIR": "$NEW", "FOLDER": "tested-versions.txt", " [tokenizer=gpt2] [workers=N]": ""},
        says=NEXT,
    ),
    "python -m recipes.prepare dialogues data_dir=DIR source=FOLDER model=FOLDER [val=FILE] "
    "…": tool(
        "workers=1",
        {
            "python": MADE,
            "data_dir=DIR": "data_dir=$NEW",
            "source=FOLDER": "source=$NEW/rows.jsonl",
            "model=FOLDER": "model=$NEW/model",
            " [val=FILE] …": "",
        },
        says=NEXT,
    ),
    "python -m recipes.prepare imagenet data_dir=PACKED source=FOLDER [size=256] [workers=N] "
    "…": tool(
        "size=24",
        {"PACKED": "$NEW", "FOLDER": "$DATA", "[size=256] [workers=N] …": "workers=1"},
        says=NEXT,
    ),
    "python -m recipes.report": tool(says="^runs/cifar/1234_0 +done "),
    "python -m recipes.report runs/cifar/1234_*": tool(says="^runs/cifar/1234_1 +done "),
    "python -m recipes.report runs/cifar html=runs.html": tool(says=r"^runs.html: \d runs$"),
    # The library of a tracker may not be installed.
    "python -m recipes.export runs/cifar to=tensorboard": tool(
        "|| test $? = 2", says=r" to runs/cifar/|pip install '.\[trackers\]'$"
    ),
    "python -m recipes.report --json runs/cifar": tool(says='"state": "done"'),
    "python -m recipes.toy": here(says="^toy: 1 rank "),
    "torchrun --nproc-per-node=2 -m recipes.toy device=cpu run_dir=runs/toy/1": here(
        "max_steps=20", says="^toy: 2 ranks on 1 node"
    ),
    "python launch.py recipe=toy nodes=2": slurm("device=cpu max_steps=20"),
}


def typed(line: str) -> str:
    """What is typed for a command. Raises AssertionError if a piece to be swapped does not occur in
    it exactly once.
    """
    how = TABLE[line]
    for piece, other in how.swap.items():
        assert line.count(piece) == 1, (
            f"{piece!r} is to be swapped, and occurs {line.count(piece)} times: {line}"
        )
        line = line.replace(piece, other)
    return f"{line} {how.add}".rstrip()
