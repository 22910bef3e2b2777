"""Bugs in the signals, the supervision and the requeues of a user's program."""

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "recipes/core/program/watch.py",
        "            self._changed.clear()\n",
        "",
        "a wrapper reads the run directory without a pause while its program saves",
        "tests/unit/program/test_watch.py",
    ),
    Mutation(
        "recipes/script.py",
        'environ.setdefault("OMP_NUM_THREADS", str(threads))',
        'environ["OMP_NUM_THREADS"] = str(threads)',
        "a program gets one thread although its user has exported 8",
        "tests/unit/program/test_variables.py",
    ),
    Mutation(
        "recipes/core/program/delivery.py",
        "    if caught and counts(process):\n",
        "    if caught:\n",
        "torchrun or a shell gets the signal, ends the ranks, and the program does not save",
        "tests/unit/program/test_delivery.py",
    ),
    Mutation(
        "recipes/core/program/delivery.py",
        " or STACKS in child.caught",
        "",
        "ranks that a program forks are not asked to save",
        "tests/unit/program/test_delivery.py",
    ),
    Mutation(
        "recipes/core/program/supervise.py",
        "        for number in stops:  # a",
        "        for number in ():  # a",
        "a program in a background job finds its signals ignored, and cannot be stopped",
        "tests/unit/program/test_supervise.py",
    ),
    Mutation(
        "recipes/core/program/supervise.py",
        "        self._asked_at = time.time()",
        "        self._asked_at = self._asked_at or time.time()",
        "a rank that fails after a signal that no program caught is requeued in place of failed",
        "tests/unit/program/test_supervise.py",
    ),
    Mutation(
        "recipes/core/program/hook/sitecustomize.py",
        "            with_stops_blocked(start)(self)\n",
        "            start(self)\n",
        "Slurm's signal to all processes ends the DataLoader workers, "
        "and the program before it has saved",
        "tests/unit/program/test_hook.py",
    ),
    Mutation(
        "recipes/core/program/hook/bin/scontrol",
        '&& ${2-} == "$job"',
        "",
        "a program that requeues another job stops itself, and the other job is not requeued",
        "tests/unit/program/test_shim.py",
    ),
    Mutation(
        "recipes/core/launch/batch.py",
        "at = time.time() + (early_s if is_of_limit else SEEN_S)",
        "at = time.time() + SEEN_S",
        "a program in a job of a few minutes is stopped at its start",
        "tests/unit/launch/test_batch.py",
    ),
    Mutation(
        "recipes/core/program/silence.py",
        "        if now != before or watch.is_stopping:\n",
        "        if now != before:\n",
        "a program that saves for long at the time limit is ended as one that hangs",
        "tests/unit/program/test_silence.py",
    ),
    Mutation(
        "recipes/core/program/silence.py",
        "saves.digest(attempt, logs)",
        "logs",
        "a program that prints but saves seldom is ended as one that hangs",
        "tests/unit/program/test_silence.py",
    ),
    Mutation(
        "recipes/core/run/positions.py",
        'answer.get("phase", int(_is_in_collective(answer)))',
        'answer.get("phase", 0)',
        "the log does not name the rank of a program for which the others wait",
        "tests/unit/run/test_positions.py",
    ),
    Mutation(
        "recipes/core/run/saves.py",
        "return now != before",
        "return True or now != before",
        "a program that never saves is requeued max_requeues= times",
        "tests/unit/run/test_saves.py",
    ),
    Mutation(
        "recipes/core/program/supervise.py",
        "ends = number not in (signal.SIGUSR1, signal.SIGUSR2)",
        "ends = number != signal.SIGUSR1",
        "SIGUSR2 ends a program that does not catch it",
        "tests/unit/program/test_supervise.py",
    ),
    Mutation(
        "recipes/script.py",
        "first_rank = info.node_rank * launch.nproc",
        "first_rank = info.rank",
        "a launcher that fails on a later node is recorded as a rank of the first node",
        "tests/distributed/launch/test_script.py",
    ),
]
