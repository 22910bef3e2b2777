"""Which checkpoint a run resumes from, whether its keys allow that, and loading it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.core.config import declare, parser, run_keys
from recipes.core.errors import InputError, shown
from recipes.core.run import attempt as attempts, directory, resumed
from recipes.core.train import checkpoint
from recipes.core.train.saving import Checkpoints, plain
from recipes.core.train.world import World

# Keys of a run that control when all ranks save together.
OF_ALL_RANKS = ("checkpoint_every_steps", "keep_every_steps", "keep_best")
# an evaluation must use the same values of these keys as the training
OF_THE_MODEL = {"arch", "ema"}
# sets of samples, which a checkpoint names by their digests
SETS = {"data": "training set", "validation_data": "validation set"}
# If one of these differs, a resumed run is not bitwise equal to an uninterrupted one.
OF_THE_BITS = {"torch", "world_size", "cpu_threads", "device"}


def load_chosen(checkpoints: Checkpoints) -> None:
    """Loads the checkpoint that ``resume=`` selects into ``checkpoints.state``, if there is one.
    Called by all ranks.
    """
    chosen = checkpoints.world.from_rank_0("checkpoint", lambda: choose(checkpoints))
    if chosen:
        load(checkpoints, at(checkpoints, *chosen))


def places(checkpoints: Checkpoints) -> list[Path]:
    """The folders that may hold the checkpoint, by this rank's own keys."""
    if checkpoints.settings.run.resume in run_keys.RESUME_WORDS:
        return [checkpoints.folder]
    wanted = _wanted(checkpoints)
    return [checkpoints.folder, wanted / "checkpoints", wanted, wanted.parent]


def _wanted(checkpoints: Checkpoints) -> Path:
    return Path(os.path.realpath(Path(checkpoints.settings.run.resume).expanduser()))


def at(checkpoints: Checkpoints, place: int, name: str) -> Path:
    """The checkpoint that rank 0 has chosen: its folder's position in `places`, and its name.
    Raises InputError.
    """
    if not checkpoint.NAME.fullmatch(name) and name != _wanted(checkpoints).name:
        raise InputError(
            f"rank 0's port sent {shown(name)}, which is not a checkpoint to resume from: "
            "give the same resume= on all ranks, "
            "or, if another program uses this port, set another MASTER_PORT"
        )
    return places(checkpoints)[place] / name


def choose(checkpoints: Checkpoints) -> tuple[int, str] | None:
    """The checkpoint to resume from, for `at`; None for none. Only rank 0 calls it. Raises
    InputError.
    """
    path = _choose(checkpoints)
    return (places(checkpoints).index(path.parent), path.name) if path else None


def _choose(checkpoints: Checkpoints) -> Path | None:
    wanted = checkpoints.settings.run.resume
    candidates = checkpoint.candidates(checkpoints.folder)
    if candidates and _has_saved_before(checkpoints):
        wanted = "auto"  # continue from this job's own newest checkpoint
    if wanted not in ("auto", "never"):
        is_pointer = wanted in run_keys.RESUME_WORDS
        path = checkpoints.folder / wanted if is_pointer else _wanted(checkpoints)
        name = path.name in ("best", "latest") and checkpoint.named(path.parent, path.name)
        if name:
            path = path.with_name(name)
        elif is_pointer:
            raise InputError(f"resume={wanted}: {path} does not exist: leave resume= out")
        try:
            path.stat()
        except OSError as error:
            where = f"{error.strerror} on {checkpoints.world.host}"
            raise InputError(f"resume={wanted}: {where}: give another resume=") from None
        if not path.is_dir():
            return path
        candidates = checkpoint.candidates(path / "checkpoints") or checkpoint.candidates(path)
        if not candidates:
            raise InputError(
                f"resume={wanted}: there is no checkpoint in that folder: "
                "give a run directory that has one, or a file"
            )
    if not candidates:
        return None
    if wanted == "never":
        problem = f"{checkpoints.attempt.run_dir} has a checkpoint ({candidates[0].name})"
        raise InputError(f"resume=never: {problem}: give another run_dir, or resume=auto")

    for path in candidates:
        try:
            checkpoint.read(path)
            return path
        except InputError as error:
            next_step = "" if path == candidates[-1] else "; using the previous checkpoint"
            checkpoints.console.warn(f"{error}{next_step}")
    raise InputError(
        f"{candidates[0].parent}: no checkpoint can be read: "
        "to start from step 0, move the checkpoints to another folder"
    )


def _has_saved_before(checkpoints: Checkpoints) -> bool:
    """Whether this job was requeued, or has started its ranks again, and a checkpoint of its
    earlier training exists.
    """
    is_again = checkpoints.world.ranks.restart_count or checkpoints.attempt.is_restart
    if checkpoints.settings.config.evaluate or not is_again:
        return False
    before = attempts.owner(checkpoints.attempt.run_dir)  # this attempt has not begun yet
    if not before:
        return False
    facts = before.facts()
    if facts.get("job") != checkpoints.attempt.facts().get("job"):
        return False
    if facts.get("own"):
        return True
    status = directory.read_status(checkpoints.attempt.run_dir)
    return bool(status.get("attempt") == before.number and status["step"] > facts.get("step", 0))


def load(checkpoints: Checkpoints, path: Path) -> None:
    """Loads a checkpoint, if the run's keys allow that, and logs it. Called by all ranks.

    Raises InputError if a key of the run differs that may not, or if the checkpoint cannot be read.
    Raises MachineError if this node does not see it.
    """
    state = checkpoints.state
    world = checkpoints.world
    problem = f"{world.host}: does not see {path}, which rank 0 on {world.hosts[0]} has chosen"
    world.await_seen(path, problem)
    content = checkpoint.read(path)
    meta = content["meta"]
    evaluate = checkpoints.settings.config.evaluate
    _check_keys(checkpoints, path, content)
    checkpoint.restore(path, state, content, to_train=not evaluate)
    if len(content["rng"]) == world.size:
        checkpoint.set_rng_state(content["rng"][world.rank], world.device)
    # A checkpoint from another folder does not count: this run has no best checkpoint yet, and no
    # postponed evaluation.
    if path.parent == checkpoints.folder:
        state.meta |= {name: meta.get(name) for name in ("best", "unevaluated")}
    if "loss_scale" in meta:
        state.meta["loss_scale"] = meta["loss_scale"]
    checkpoints.resumed_from = path
    checkpoints.resumed_from_step = state.step
    say = checkpoints.console.say
    say(f"resumed from {path}, step {state.step}")
    before = meta.get("code") or {}
    now = state.meta["code"]
    changed = ", ".join(name for name in now if before.get(name, now[name]) != now[name])
    if changed:
        problem = "the code has changed since this checkpoint was saved"
        say(f"warning: {problem}: {changed}")

    saved = {**state.meta, **meta}  # earlier versions saved no device
    other = resumed.differences(saved, state.meta, saved.keys() - OF_THE_BITS)
    if world.device.type == "cuda" and not checkpoints.settings.config.deterministic:
        other.append("deterministic=false")
    if other and not evaluate:
        say(
            "samples and order are unchanged, but results will not be bitwise identical "
            f"({'; '.join(other)})"
        )


def _check_keys(checkpoints: Checkpoints, path: Path, content: checkpoint.Content) -> None:
    """Raises InputError if a key or value differs that would change the result; for an evaluation,
    if a key of the model differs.
    """
    settings = checkpoints.settings
    order = checkpoints.order
    now = checkpoints.state.meta["config"]
    recipe = content["meta"].get("recipe")
    before = content["meta"]["config"]
    if recipe != settings.recipe:
        raise InputError(
            f"checkpoint {path}: is of recipe {recipe}, not {settings.recipe}: use that recipe"
        )
    if settings.config.evaluate:
        changed = resumed.differences(before, now, {*before, *now} - (OF_THE_MODEL & now.keys()))
    else:
        may_change = declare.may_change(type(settings.config))
        # Without the run's config.yaml, its length was not compared before.
        if not (settings.resumes or settings.run.force):
            may_change -= set(resumed.LENGTH)
        changed = resumed.differences(before, now, may_change)
        # Earlier versions saved no digest of the validation set.
        of_file = {"validation_data": order.get("validation_data"), **content["sampler"]}
        changed += resumed.differences(of_file, order, {"samples", *SETS, *now})
        others = [name for name in SETS if of_file.get(name) != order.get(name)]
        changed += [f"another {SETS[name]}" for name in others]
    if changed:
        raise InputError(
            f"checkpoint {path}: was saved with other keys or data ({'; '.join(changed)}): "
            "use its values, or another run_dir; "
            "to change only epochs= or max_steps=, add force=true"
        )


def compare_keys(world: World, settings: parser.Settings, order: Mapping[str, Any]) -> None:
    """Raises InputError on a rank whose keys or data differ from rank 0's, as is possible if ranks
    are started by hand.

    order: what determines the order of samples. The recipe's keys are compared, and the keys of the
    run that control when all ranks save (`OF_ALL_RANKS`). Called by all ranks.
    """
    of_saving = {name: getattr(settings.run, name) for name in OF_ALL_RANKS}
    keys = {**plain(settings), **order, **of_saving}
    first = world.from_rank_0("keys", lambda: keys)
    paths = declare.declared("path", type(settings.config))
    other = [
        f"{name}={value} here, {name}={shown(first.get(name))} there"
        for name, value in keys.items()
        if name not in paths and value != first.get(name)
    ]
    if other:
        raise InputError(
            f"{world.host}: its keys differ from those of rank 0 on {world.hosts[0]} "
            f"({'; '.join(other)}): use the same keys and data on all ranks"
        )
