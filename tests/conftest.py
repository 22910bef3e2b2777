"""What tests of several folders share: a Slurm cluster, and a process that a test leaves as it
was.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest

from tests import guardian, helpers
from tests.slurm.cluster import Cluster, ClusterOptions, missing, running_cluster


def pytest_configure() -> None:
    guardian.begin()
    # A shell starts a background job with SIGINT ignored, and what the tests start would inherit
    # that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Threads of torch wait for each other by spinning. With two in each worker, the workers would
    keep each other off the cores.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Commands that are called in this process set it to 077 for their own files, and recipes that
    begin in it block SIGUSR2 and let SIGINT end it.
    """
    before = os.umask(0o022)
    os.umask(before)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    interrupt = signal.getsignal(signal.SIGINT)
    yield
    os.umask(before)
    signal.signal(signal.SIGINT, interrupt)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A running Slurm of two nodes with eight GPUs each, where partition `high` preempts the
    others.

    One for all tests; each leaves its nodes idle behind. Skips where there can be none, if it is
    not required.
    """
    helpers.need(missing())
    with running_cluster(ClusterOptions(preempt=True, kill_wait_s=10)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def linuxproc() -> Iterator[Cluster]:
    """As `slurm`, but without cgroups: signals reach all processes of a job."""
    with running_cluster(ClusterOptions(preempt=True, kill_wait_s=10, linuxproc=True)) as cluster:
        yield cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the output of commands that a failed test has not waited for to its report."""
    report = yield
    if call.when == "setup":
        helpers.STARTED.clear()
    elif call.when == "call" and report.failed:
        report.sections += [(f"output of {command}", text) for command, text in helpers.unread()]
    return report
