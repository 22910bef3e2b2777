"""``launch.py scale``: the same training on several numbers of nodes, the table of its runs, and a prediction for other sizes.

python launch.py scale recipe=cifar nodes=1,2,4 max_steps=200            # submits a job for each; weak=true: larger batches too
python launch.py scale runs/scale/20260101-120000                        # the table of these runs
python launch.py scale RUN link=COLLECTIVES_RUN ranks=8,64,512,4096      # a prediction, without further jobs
"""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes.core import errors
from recipes.core.errors import ConfigError, shown
from recipes.core.launch import runs
from recipes.core.run import command_line, scaling


def scale(words: Sequence[str], root: Path, submit: Callable[[list[str]], int]) -> int:
    """Runs the command. submit: submits a job by the words of launch.py. Returns the exit status. Raises ConfigError, InputError, MachineError."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if not words or bool(names) == ("recipe" in given):
        raise ConfigError("scale: give recipe=NAME nodes=1,2,4, or a run, or several runs")
    weak = given.pop("weak", "false")
    if weak not in ("true", "false"):
        raise ConfigError(f"weak={shown(weak)}: must be true or false")
    if not names:
        return _submit_all(given, weak == "true", root, submit)
    known = {"link", "ranks"} if "link" in given else set()
    if unknown := sorted(given.keys() - known):
        raise ConfigError(
            f"scale: {unknown[0]}=: with a run, only link= and ranks= (both or neither) and weak= are possible"
        )
    if "link" in given:
        link, base = scaling.read_link(Path(given["link"])), scaling.read(runs.find(names[:1], root)[0])
        ranks = _counts("ranks", given.get("ranks", ""))
        print("\n".join(scaling.lines_of_prediction(base, link, ranks, weak == "true")))
        return errors.EXIT_DONE
    print("\n".join(scaling.lines_of_runs([scaling.read(folder) for folder in runs.find(names, root)])))
    return errors.EXIT_DONE


def _submit_all(given: dict[str, str], weak: bool, root: Path, submit: Callable[[list[str]], int]) -> int:
    counts = _counts("nodes", given.pop("nodes", ""))
    if "run_dir" in given:
        raise ConfigError("scale: run_dir= is chosen for each size: leave it out")
    place = root / "runs" / "scale" / time.strftime("%Y%m%d-%H%M%S")
    settings = command_line.parse([f"{name}={value}" for name, value in given.items()])
    batch = getattr(settings.config, "global_batch_size", 0)
    if not batch or given.get("launcher", "slurm") == "local":
        raise ConfigError("scale: give a recipe that trains; launcher=local is not supported")
    for count in counts:
        size = {"global_batch_size": str(batch * count // counts[0])} if weak else {}
        chosen = {**given, **size, "nodes": str(count), "run_dir": str(place / f"nodes-{count}")}
        if status := submit([f"{name}={value}" for name, value in chosen.items()]):
            return status
    print(f"when these jobs are done, print the table: python launch.py scale {place}")
    return errors.EXIT_DONE


def _counts(name: str, text: str) -> list[int]:
    found = text.split(",")
    if not all(re.fullmatch("[1-9][0-9]{0,6}", one) for one in found):
        raise ConfigError(f"{name}={shown(text)}: must be numbers separated by commas, such as 1,2,4")
    return sorted({int(one) for one in found})
