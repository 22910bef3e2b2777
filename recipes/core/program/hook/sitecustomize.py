"""Python loads this file at the start of each process of a program that ``script=`` runs.

Slurm signals all processes of a job at some sites (ProctrackType=proctrack/linuxproc). A worker of
a DataLoader would end, and the program with it before it has saved. Daemonic processes of
multiprocessing, such as these workers, therefore do not receive STOPS. Standard library only; it
must run with any Python 3 and must not fail.
"""

import atexit
import faulthandler
import functools
import importlib.machinery
import importlib.util
import os
import signal
import sys

STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# At this signal, a process writes its stack into a file in memory, which launch.py look reads. It
# also shows that this file was loaded.
STACKS = signal.SIGRTMAX - 2


def with_stops_blocked(function):
    """Processes that ``function`` starts inherit the blocked signals."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            return function(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return wrapper


def protect_workers():
    """Daemonic processes do not receive STOPS. Their ``terminate()`` sends SIGKILL."""
    import subprocess
    from multiprocessing import forkserver, resource_tracker
    from multiprocessing.process import BaseProcess

    start = BaseProcess.start
    bootstrap = BaseProcess._bootstrap

    @functools.wraps(start)
    def start_protected(self):
        if self.daemon:
            with_stops_blocked(start)(self)
            self._popen.terminate = self._popen.kill
        else:
            self._config["stops_blocked"] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            start(self)

    @functools.wraps(bootstrap)
    def bootstrap_of_child(self, *args, **kwargs):
        # A child of the fork server inherits from the server, which was started with STOPS blocked.
        if self.daemon:  # programs that it starts inherit the blocked signals
            subprocess.Popen.terminate = subprocess.Popen.kill
        else:
            free = set(STOPS) - set(self._config.get("stops_blocked", ()))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, free)
        return bootstrap(self, *args, **kwargs)

    BaseProcess.start = start_protected
    BaseProcess._bootstrap = bootstrap_of_child
    for server in (forkserver.ForkServer, resource_tracker.ResourceTracker):
        # the second one from Python 3.13.7 on
        for name in (
            "ensure_running",
            "_ensure_running_and_write",
        ):
            if hasattr(server, name):
                setattr(server, name, with_stops_blocked(getattr(server, name)))
    resource_tracker.ensure_running = resource_tracker._resource_tracker.ensure_running
    # At exit, torch's handler would report workers that are killed as failed.
    atexit.register(signal.signal, signal.SIGCHLD, signal.SIG_DFL)


def register_stacks():
    """As core/place/stacks.py does, which explains it. Before Python 3.8, into stderr."""
    file = os.memfd_create("python-stacks") if hasattr(os, "memfd_create") else 2
    signal.signal(STACKS, signal.SIG_IGN)
    faulthandler.register(STACKS, file=file, all_threads=False)


def load_next():
    """Loads the sitecustomize.py that this file hides, such as that of a distribution or a site."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != own]
    spec = importlib.machinery.PathFinder.find_spec(__name__, sys.path)
    if spec:
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    try:
        protect_workers()
        register_stacks()
    except Exception as error:
        sys.stderr.write(f"warning: DataLoader workers are not protected: {error!r}\n")
    load_next()
