"""``launch.py scale``: the same training on several numbers of nodes, the table of its runs, and a
prediction for other sizes.

python launch.py scale recipe=cifar nodes=1,2,4 max_steps=200            # submits a job for each;
                                                                         weak=true: larger batches
                                                                         too
python launch.py scale runs/scale/20260101-120000                        # the table of these runs
python launch.py scale RUN link=COLLECTIVES_RUN ranks=8,64,512,4096      # a prediction, without
                                                                         further jobs

A step takes the work of a rank, plus the part of an all_reduce that the backward pass does not
hide. On n ranks, an all_reduce takes t = 2 (n - 1) latency + 2 (n - 1) / n * bytes / bandwidth, as
in a ring.
"""

import re
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core.config import key_value
from recipes.core.config.job_keys import Launcher
from recipes.core.errors import ConfigError, EXIT_DONE, InputError, printable, shown
from recipes.core.files import Json
from recipes.core.launch import runs
from recipes.core.run import command_line, efficiency, record, rows
from recipes.core.run.rows import number

# Submits a job by the words of launch.py, and adds its results, for --json, to a dictionary.
Submit = Callable[[list[str], Json], int]

BACKWARD = 2 / 3  # the backward pass's share of forward and backward; on a GPU it hides the ring
ASSUMED = (
    "assumed: a rank's work is in proportion to its samples; each rank has as many CPUs and the "
    "same type of GPU as in the measured run; the latency and bandwidth of all_reduce's ring stay "
    "as measured; communication overlaps with the backward pass on GPUs, but not on CPUs"
)


def scale(words: Sequence[str], root: Path, submit: Submit, told: Json) -> int:
    """Runs the command. told: gets the runs that were submitted. Returns the exit status. Raises
    ConfigError, InputError, MachineError.
    """
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    has_recipe = "recipe" in keys
    if bool(names) == has_recipe:  # neither or both
        raise ConfigError("scale: give recipe=NAME nodes=1,2,4, or a run, or several runs")
    weak = keys.pop("weak", "false")
    if weak not in ("true", "false"):
        raise ConfigError(f"weak={shown(weak)}: must be true or false")
    is_weak = weak == "true"
    if not names:
        return _submit_all(keys, is_weak, root, submit, told)
    unknown = keys.keys() - ({"link", "ranks"} if "link" in keys else set())
    if unknown:
        raise ConfigError(
            f"scale: {min(unknown)}=: with a run, only link= and ranks= (both or neither) and "
            "weak= are possible"
        )
    if "link" in keys:
        if len(names) > 1:
            raise ConfigError("scale: link= predicts from one run: give one run")
        link = read_link(Path(keys["link"]))
        base = read(runs.find(names[:1], root)[0])
        lines = lines_of_prediction(base, link, _counts("ranks", keys.get("ranks", "")), is_weak)
    else:
        if is_weak:
            raise ConfigError("scale: weak= with a run is for a prediction: give link= and ranks=")
        lines = lines_of_runs([read(folder) for folder in runs.find(names, root)])
    print("\n".join(map(printable, lines)))
    return EXIT_DONE


def _submit_all(keys: dict[str, str], weak: bool, root: Path, submit: Submit, told: Json) -> int:
    counts = _counts("nodes", keys.pop("nodes", ""))
    if "run_dir" in keys:
        raise ConfigError("scale: run_dir= is chosen for each size: leave it out")
    place = root / "runs" / "scale" / time.strftime("%Y%m%d-%H%M%S")
    settings = command_line.parse(key_value.words_of(keys))
    batch = settings.config.global_batch_size
    if not batch or settings.job.launcher is Launcher.local:
        raise ConfigError("scale: give a recipe that trains; launcher=local is not supported")
    for count in counts:
        if weak:
            keys["global_batch_size"] = str(batch * count // counts[0])
        chosen = {**keys, "nodes": count, "run_dir": place / f"nodes-{count}"}
        submitted = Json()
        status = submit(key_value.words_of(chosen), submitted)
        told.setdefault("runs", []).extend(submitted.get("runs", ()))
        if status:
            return status
    command = shlex.join(["python", "launch.py", "scale", str(place)])
    print(f"when these jobs are done, print the table: {command}")
    return EXIT_DONE


def _counts(name: str, text: str) -> list[int]:
    counts = text.split(",")
    if not all(re.fullmatch("[1-9][0-9]{0,6}", count) for count in counts):
        raise ConfigError(
            f"{name}={shown(text)}: must be numbers separated by commas, such as 1,2,4"
        )
    return sorted(set(map(int, counts)))


@dataclass(frozen=True)
class Link:
    """What `recipes.collectives` has measured for all_reduce. latency_s: of one of the ring's
    steps. bandwidth: bytes/s (busbw).
    """

    latency_s: float
    bandwidth: float

    def all_reduce_s(self, size: float, ranks: int) -> float:
        """Seconds of an all_reduce of ``size`` bytes."""
        return 2 * (ranks - 1) * self.latency_s + 2 * (ranks - 1) / ranks * size / self.bandwidth


@dataclass(frozen=True)
class Measured:
    """A run. samples: per optimiser step. speed: samples/s over all ranks. work_s: seconds of a
    rank per step, without waiting for others.
    """

    folder: Path
    recipe: str
    ranks: int
    nodes: int
    samples: float
    speed: float
    work_s: float
    backward_s: float  # part of work_s during which a GPU also communicates; 0 on a CPU
    gradient_bytes: float


def read(folder: Path) -> Measured:
    """Reads a run that is done. Raises InputError."""
    run = record.read(folder)
    summary = run.summary
    if summary.get("strategy") == "fsdp":
        raise InputError(
            f"{folder}: was trained with strategy=fsdp, which the prediction does not support: "
            "give a run with strategy=ddp"
        )
    speeds = []
    work = []
    for row in rows.newest(folder):
        speeds.append(number(row.get("samples_per_second")))
        work += [value for value in rows.numbers(row.get("rank_step_s")) if value > 0]
    names = ("world_size", "num_nodes", "samples_per_second", "parameters")
    sizes = [number(summary.get(name)) for name in names]
    if not all(value > 0 for value in sizes) or not work:
        raise InputError(
            f"{folder}: is not a finished training run with step times of its ranks: "
            "give the directory of a training run that is done"
        )
    ranks, nodes, speed, parameters = sizes
    # without the start, which the first row has in it
    speed = statistics.median([value for value in speeds[:-1] if value > 0] or [speed])
    samples = number(summary.get("global_batch_size"))
    backward_s = 0.0
    if summary.get("device") == "cuda":
        share = efficiency.shares(run.newest_rows).get("forward_backward", 0.0) * BACKWARD
        backward_s = share * samples / speed
    return Measured(
        folder,
        str(summary.get("recipe")),
        int(ranks),
        int(nodes),
        samples,
        speed,
        statistics.median(work),
        backward_s,
        4 * parameters,
    )


def read_link(folder: Path) -> Link:
    """The all_reduce of a run of recipes.collectives with mode=bench. Raises InputError."""
    summary = record.read(folder).summary
    ranks = number(summary.get("world_size"))
    parts = (summary.get("busbw"), summary.get("latency_us"))
    busbw, latency_us = (
        number(part.get("all_reduce")) if isinstance(part, dict) else 0.0 for part in parts
    )
    if not (busbw > 0 and latency_us > 0 and ranks > 1):
        raise InputError(
            f"{folder}: has no measured bandwidth and latency of all_reduce: run "
            "recipe=collectives mode=bench operations=all_reduce sizes=4..64M on two nodes or more"
        )
    return Link(latency_us / 1e6 / (2 * (ranks - 1)), busbw * 1e9)


def predicted(base: Measured, link: Link, ranks: int, weak: bool) -> tuple[float, float]:
    """Seconds of a step on ``ranks`` ranks, and how many of them are communication that no
    computation hides. weak: samples per rank stay the same.
    """
    share = 1.0 if weak else base.ranks / ranks
    ring_s = link.all_reduce_s(base.gradient_bytes, ranks)  # 0 for one rank
    exposed_s = max(0.0, ring_s - base.backward_s * share)
    return base.work_s * share + exposed_s, exposed_s


def lines_of_prediction(base: Measured, link: Link, ranks: Sequence[int], weak: bool) -> list[str]:
    """A table of the predicted steps."""
    kind = "weak: samples per rank" if weak else "strong: samples per step"
    lines = [
        f"{base.recipe} from {base.folder} ({base.ranks} ranks, "
        f"{1e3 * base.samples / base.speed:.4g} ms per step); scaling is {kind} stay the same",
        f"{'ranks':>8}{'ms per step':>14}{'samples/s':>14}{'efficiency':>12}{'communication':>15}",
    ]
    of_one_s, _ = predicted(base, link, 1, weak)
    for count in ranks:
        step_s, exposed_s = predicted(base, link, count, weak)
        samples = base.samples * count / base.ranks if weak else base.samples
        share = of_one_s / step_s if weak else of_one_s / step_s / count
        lines.append(
            f"{count:>8}{1e3 * step_s:>14.4g}{samples / step_s:>14,.1f}"
            f"{share:>12.0%}{exposed_s / step_s:>15.0%}"
        )
    return [*lines, ASSUMED]


def lines_of_runs(runs: Sequence[Measured]) -> list[str]:
    """A table of measured runs of one recipe, by ranks. Efficiency is relative to the run with the
    fewest ranks.
    """
    runs = sorted(runs, key=lambda run: (run.ranks, run.nodes))
    base = runs[0].speed / runs[0].ranks
    lines = [
        f"{'ranks':>8}{'nodes':>7}{'samples/step':>14}{'ms per step':>14}{'samples/s':>14}"
        f"{'efficiency':>12}"
    ]
    for run in runs:
        lines.append(
            f"{run.ranks:>8}{run.nodes:>7}{run.samples:>14,.0f}"
            f"{1e3 * run.samples / run.speed:>14.4g}{run.speed:>14,.1f}"
            f"{run.speed / (base * run.ranks):>12.0%}"
        )
    return lines
