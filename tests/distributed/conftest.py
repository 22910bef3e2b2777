"""Runs that several files look at, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import helpers

# 1,437 digits in batches of 205: neither 3 nor 4 ranks divide one, and the last of an epoch has 2 samples, so that ranks have none.
SAME = ("global_batch_size=205", "max_steps=20", "log_every_steps=1", "seed=7", "cpu_threads=1")


@pytest.fixture(scope="session")
def same_run(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The run directories of one and the same run, by the number of its ranks: three launchers, started at once."""
    folder = tmp_path_factory.mktemp("same")
    run_dirs = {size: folder / f"ranks{size}" for size in (1, 3, 4)}
    started = [
        helpers.fork([*helpers.LOCAL, *SAME, f"ranks_per_node={size}", f"run_dir={run_dir}"])
        for size, run_dir in run_dirs.items()
    ]
    for ended in [helpers.finish(process) for process in started]:
        assert ended.status == 0, ended.out
    return run_dirs
