"""profile=N: a trace of N steps of rank 0, and its summary on one page."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.profiler import profile, schedule

from recipes.core import files, trust
from recipes.core.train.run import Run

# steps that are not recorded: torch compiles, allocates and chooses algorithms in them
WAIT = 3
WARM_UP = 2
ROWS = 25  # operations in the summary


@contextlib.contextmanager
def profiling(run: Run, steps: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step. Of rank 0, ``steps`` steps are recorded by torch's
    profiler; 0: none.

    Writes ``profile/trace.json.gz``, for Perfetto or chrome://tracing, and ``profile/summary.txt``
    in the run directory.
    """
    if not steps or run.world.rank:
        yield lambda: None
        return
    folder = run.dir / "profile"
    gpu = run.world.device.type == "cuda"
    first = run.step

    def write(trace: profile) -> None:
        with files.writing_to(run.dir, "run_dir"):
            trust.own_folder(folder)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                new = Path(scratch, "trace.json.gz")
                trace.export_chrome_trace(str(new))
                new.replace(folder / new.name)  # which may be a link
            order = "self_device_time_total" if gpu else "self_cpu_time_total"
            operations = trace.key_averages()
            summary = operations.table(order, row_limit=ROWS, max_name_column_width=60)
            files.write_bytes(folder / "summary.txt", summary.encode())
        run.say(f"profile: {folder}")

    plan = schedule(wait=WAIT, warmup=WARM_UP, active=steps, repeat=1)
    with profile(schedule=plan, on_trace_ready=write) as recorded:
        yield recorded.step
    if run.step - first <= WAIT + WARM_UP:
        first_steps = f"the first {WAIT + WARM_UP} steps are not recorded"
        run.say(f"warning: profile=: no step was recorded, since {first_steps}: train more steps")
