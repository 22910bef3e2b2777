"""The outcome of a run: its best evaluation, whether patience= ends it, and summary.json."""

import contextlib
import math
import platform
import sys
import time
from typing import Any

import torch

from recipes.core import files
from recipes.core.config.run_keys import Mode, TrainKeys
from recipes.core.errors import InputError, Kind, RunError
from recipes.core.run import attempt as attempts, directory, efficiency, ledger, rows, watchdog
from recipes.core.train import metrics, sharding
from recipes.core.train.run import Results, Run


def metric(cfg: TrainKeys) -> str:
    """The name of the result by which evaluations are compared."""
    return cfg.best_metric or "val_top1"


def is_best(run: Run) -> bool:
    """Whether ``run.results`` are the best so far. If they are, ``state.meta`` records them. The
    same on all ranks.

    Raises InputError if ``best_metric`` is given and is not one of the results.
    """
    cfg = run.settings.config
    name = metric(cfg)
    score = run.results.get(name)
    is_needed = run.results and (cfg.best_metric or cfg.patience)
    if is_needed and not isinstance(score, float | int):
        numbers = [key for key, value in run.results.items() if isinstance(value, float)]
        raise InputError(
            f"best_metric={name}: must be one of the numbers that the evaluation returns "
            f"({', '.join(numbers) or 'none'})"
        )
    if score is None:
        return False
    if not math.isfinite(score):
        problem = f"{name} is {score} at step {run.step}"
        run.say(f"warning: {problem}: this evaluation cannot be the best")
        return False

    best = run.state.meta.get("best") or {}
    sign = 1 if cfg.best_mode is Mode.max else -1
    if name in best and sign * score <= sign * best[name]:
        return False
    run.state.meta["best"] = {name: float(score), "step": run.step}
    return True


def has_stalled(run: Run, per_epoch: int) -> bool:
    """Whether ``patience`` epochs of ``per_epoch`` steps have passed since the best evaluation."""
    cfg = run.settings.config
    meta = run.state.meta
    best = meta.get("best") or {}
    if not cfg.patience or meta.get("unevaluated") or metric(cfg) not in best:
        return False
    return bool(run.step - best["step"] >= cfg.patience * per_epoch)


def finish(run: Run, results: Results) -> None:
    """Writes ``summary.json`` with ``results`` and sets the status to done; to preempted if the run
    was stopped before its end.

    Raises RunError if the recipe has left the loop over `loop.steps` early, or if ``results``
    cannot be written.
    """
    if run.state and not run.complete:
        raise RunError(
            "main() has left the loop over loop.steps() before its end: "
            "remove the break or return, and give max_steps= instead"
        )
    results = metrics.require_results("main()", results)
    run.world.pulse.beat(watchdog.OUTSIDE)
    if run.world.rank:
        return

    attempts.check_owner(run.attempt)
    cfg = run.settings.config
    with contextlib.suppress(OSError):
        run.attempt.staging.rmdir()  # it is empty: everything is saved
    step = run.step
    if run.stopping:
        attempts.write_status(
            run.attempt, "preempted", step, reason=run.stopping, kind=Kind.stopped
        )
        place = f"at step {step}, saved in {run.dir}"
        if cfg.evaluate:
            place = "before the evaluation's end"
        run.say(f"stopped by {run.stopping} {place}")
        return

    if results or not (run.dir / "summary.json").exists():
        summary = _summary(run)
        if "efficiency" in summary:
            run.say(f"efficiency: {summary['efficiency']}")
        files.write_json(run.dir / "summary.json", {**summary, **results})
    attempts.write_status(run.attempt, "done", step)
    run.checkpoints.export()
    ended = "evaluated" if cfg.evaluate else "finished at"
    run.say(f"{ended} step {step}{directory.results(run.dir)}")


def _summary(run: Run) -> dict[str, Any]:
    """The content of ``summary.json``, without the results."""
    cfg = run.settings.config
    summary = {
        "recipe": run.settings.recipe,
        "world_size": run.world.size,
        "num_nodes": run.world.ranks.num_nodes,
        "device": run.world.device.type,
        "backend": run.world.backend,
        "epochs": cfg.epochs,
        "steps": run.step,
        "samples_per_second": round(run.samples / run.train_s, 1) if run.train_s else None,
        "wall_seconds": round(time.monotonic() - run.opened_at, 3),
        "resumed_from_step": run.checkpoints.resumed_from_step,
        "restarts": run.attempt.number,
        "git_commit": run.commit,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            # If the recipe uses it.
            "torchvision": getattr(sys.modules.get("torchvision"), "__version__", None),
            "cuda": torch.version.cuda,
        },
    }
    if run.state:
        _, summary["parameters"] = sharding.counts(run.state.model)
        summary["global_batch_size"] = cfg.global_batch_size
        summary["strategy"] = cfg.strategy
        if run.state.meta["best"]:
            summary["best"] = run.state.meta["best"]

    of_attempts = ledger.of_attempts(run.dir, time.time(), is_running=False)
    summary["ledger"] = ledger.total(of_attempts)
    facts = run.attempt.facts()
    line = efficiency.verdict(rows.rows(run.dir, rows.NEWEST), facts, run.settings.saved)
    if line:
        summary["efficiency"] = line
    return summary
