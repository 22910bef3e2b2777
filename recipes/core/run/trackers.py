"""Adds the metrics of a run to an experiment tracker, as one series with rising steps. The
trackers' libraries are optional.
"""

import json
import math
import os
import secrets
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recipes.core import errors, files, trust
from recipes.core.errors import InputError
from recipes.core.run import record, rows
from recipes.core.run.record import State

# in the run directory; POSITION has the last row in each tracker
POSITION = "exported.json"
LOCK = ".exported.lock"
require = partial(errors.require, extra="trackers")
# that MLflow accepts: values in one call, characters of a parameter
MOST_VALUES = 1000
LONGEST = 500


@dataclass(frozen=True)
class New:
    """What a tracker does not have yet. id: the run's in the tracker. summary: {} until the run is
    done. first: for a first export.
    """

    folder: Path
    project: str
    name: str
    id: str
    first: bool
    keys: files.Json
    values: list[tuple[int, dict[str, float]]]  # step and metrics of each row
    summary: files.Json


def export(folder: Path, to: str, project: str) -> str:
    """Adds the new rows of a run to a tracker. Returns one line. Raises InputError, and
    MachineError if the run directory is read-only.
    """
    run = record.read(folder)
    project = project or run.recipe or "recipes"
    is_done = run.state is State.done
    place = to if to == "tensorboard" else f"{to} {project}"
    known = files.read_json(folder / POSITION)
    last = {"step": -1, "id": "", "row": "null", "done": False, **known.get(place, {})}
    # A resumed run writes the rows after its newest checkpoint again.
    highest = math.inf if is_done else max(run.saved_step - 1, last["step"])
    back = 0
    final = []  # newest first
    exported = None
    for row in rows.newest(folder):
        if row["step"] > highest:
            back += 1
        elif row["step"] > last["step"]:
            final.append(row)
        else:
            exported = row if row["step"] == last["step"] else None
            break
    held = f"; {back} rows are not exported yet: a resume may replace them" if back else ""
    if json.dumps(exported) != last["row"]:
        fix = f"remove {POSITION} to export all again"
        raise InputError(f"{folder}: {place} has rows that a resume replaced: {fix}")
    values = [(row["step"], _numbers(row)) for row in reversed(final)]
    if not values and last["done"] >= is_done:
        return f"{folder}: nothing new for {place}{held}"
    new = New(
        folder,
        project,
        name=f"{run.recipe} {folder.name}",
        id=last["id"] or secrets.token_hex(8),
        first=not last["id"],
        keys={} if last["id"] else run.values,
        values=values,
        summary=run.summary,
    )
    try:
        identity, where = TRACKERS[to](new)
    except InputError:
        raise
    except Exception as error:  # each library has its own classes
        raise InputError(f"{folder}: {to}: {errors.one_line(error)}") from None
    newest = final[0] if final else exported
    position = {
        "step": newest["step"] if newest else -1,
        "row": json.dumps(newest),
        "id": identity,
        "done": is_done,
    }
    with files.writing_to(folder, "run_dir"):
        files.write_json(folder / POSITION, {**known, place: position})
    return f"{folder}: {len(values)} rows to {where}{held}"


def _numbers(row: rows.Row) -> dict[str, float]:
    metrics = {name: value for name, value in row.items() if name != "step"}
    return {name: rows.number(x) for name, x in metrics.items() if type(x) in (int, float)}


def _tensorboard(new: New) -> tuple[str, str]:
    event = require("tensorboard.compat.proto.event_pb2")
    writers = require("tensorboard.summary.writer.event_file_writer")
    scalar, text, hparams = (
        require(f"tensorboard.plugins.{n}.summary_v2") for n in ("scalar", "text", "hparams")
    )
    events = []
    if new.keys:
        keys = {name: str(value) for name, value in new.keys.items()}
        events.append((0, hparams.hparams_pb(keys)))
    for step, values in new.values:
        events += [(step, scalar.scalar_pb(name, value)) for name, value in values.items()]
    if new.summary:
        about = text.text_pb("summary", json.dumps(new.summary))
        events.append((new.summary.get("steps", 0), about))
    folder = new.folder / "tensorboard"
    trust.own_folder(folder)
    writer = writers.EventFileWriter(str(folder))
    for step, summary in events:
        writer.add_event(event.Event(wall_time=time.time(), step=step, summary=summary))
    writer.close()
    return new.id, str(folder)


def _wandb(new: New) -> tuple[str, str]:
    wandb = require("wandb")
    mode = os.environ.get("WANDB_MODE", "offline")
    place = os.environ.get("WANDB_DIR") or str(new.folder)
    run = wandb.init(
        project=new.project,
        name=new.name,
        id=new.id,
        resume=None if new.first else "allow",
        config=new.keys,
        mode=mode,
        dir=place,
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    for step, values in new.values:
        run.log(values, step=step)
    run.summary.update(new.summary)
    run.finish()
    return new.id, f"{place}/wandb ({mode})"


def _mlflow(new: New) -> tuple[str, str]:
    # plain files: SQLite can fail on a shared disk
    uri = os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
    # MLflow 3.17 refuses plain files without it
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    entities = require("mlflow.entities")
    client = require("mlflow").MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name(new.project)
    number = known.experiment_id if known else client.create_experiment(new.project)
    identity = client.create_run(number, run_name=new.name).info.run_id if new.first else new.id
    now = round(time.time() * 1000)
    metrics = [
        entities.Metric(name, x, now, step)
        for step, values in new.values
        for name, x in values.items()
    ]
    for start in range(0, len(metrics), MOST_VALUES):
        client.log_batch(identity, metrics[start : start + MOST_VALUES])
    for name, value in new.keys.items():
        client.log_param(identity, name, errors.shown(value, LONGEST))
    for name, value in new.summary.items():
        client.set_tag(identity, f"summary.{name}", errors.shown(value, LONGEST))
    client.set_terminated(identity, "FINISHED" if new.summary else "RUNNING")
    return identity, f"{uri}, experiment {new.project}"


def _trackio(new: New) -> tuple[str, str]:
    options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    # the name identifies a run
    name = f"{new.name} {new.id[:6]}"
    resume = "never" if new.first else "must"
    run = require("trackio").init(new.project, name=name, config=new.keys, resume=resume, **options)
    for step, values in new.values:
        run.log(values, step=step)
    run.finish()
    return new.id, f"trackio, project {new.project}"


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
