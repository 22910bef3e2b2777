"""Bugs in signals, the state of a job, the watchdog, the code of a run, and the table of runs."""

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "recipes/core/run/signals.py",
        "margin = min(stop_before_s, SHARE * known)",
        "margin = min(stop_before_s - 600, SHARE * known)",
        "the run stops 10 minutes late, after the end of its job",
        "tests/unit/run/test_signals.py",
    ),
    Mutation(
        "recipes/core/run/queue.py",
        "else limit_s - run_s",
        "else limit_s",
        "the time left is read as the whole time limit, and the job ends without a checkpoint",
        "tests/unit/run/test_queue.py::test_the_time_left_is_the_controllers_else_that_of_the_jobs_environment",
    ),
    Mutation(
        "recipes/core/run/signals.py",
        "known = known - wait if now is None else now",
        "known = known if now is None else now",
        "if the controller does not answer, the job reaches its time limit without a checkpoint",
        "tests/unit/run/test_signals.py",
    ),
    Mutation(
        "recipes/core/run/queue.py",
        'if array and task else fields.get("JobId", "")',
        'if False else fields.get("JobId", "")',
        "an array task has an id that scancel does not know",
        "tests/unit/run/test_queue.py::test_each_job_that_scontrol_prints_is_parsed",
    ),
    Mutation(
        "recipes/core/run/queue.py",
        "if self.waiting or self.restarts > restarts:",
        "if self.waiting:",
        "a job that Slurm requeues counts as cancelled",
        "tests/unit/launch/test_batch.py::test_a_job_whose_end_slurm_has_decided_is_not_requeued",
    ),
    Mutation(
        "recipes/core/run/table.py",
        'if status.get("state") == "done" else {}',
        "if status else {}",
        "the table shows a failed run with the accuracy of an earlier attempt",
        "tests/unit/run/test_table.py",
    ),
    Mutation(
        "recipes/core/run/in_use.py",
        "if not found or found.ended or (",
        'if not found or found.ended or found.state != "RUNNING" or (',
        "a second job takes over the run directory of a suspended or requeued job",
        "tests/slurm/test_second_job.py",
    ),
    Mutation(
        "recipes/core/run/judge.py",
        "if by_parent and by_parent.kind is Kind.killed:",
        "if False:",
        "a rank that lost its killed peer is named in its place",
        "tests/unit/run/test_judge.py",
    ),
    Mutation(
        "recipes/core/run/attempt.py",
        "            _remove(Attempt(attempt.run_dir, number).staging)\n",
        "            pass\n",
        "a rank of an earlier attempt that wakes up replaces a checkpoint of its successor",
        "tests/unit/run/test_attempt.py",
    ),
    Mutation(
        "recipes/core/run/watchdog.py",
        "elif moment - since > timeout_s:",
        "elif quiet_s > 60 * timeout_s:",
        "the watchdog ends a rank that hangs after hours, not after minutes",
        "tests/unit/run/test_watchdog.py",
    ),
    Mutation(
        "recipes/core/run/resumed.py",
        "if not finished and now.lr_depends_on_length:",
        "if False:",
        "epochs= on a resume changes the learning-rate schedule without force=true",
        "tests/unit/config/test_config.py",
    ),
    Mutation(
        "recipes/core/run/command_line.py",
        "for chosen in itertools.product(*values.values()))",
        "for chosen in itertools.product(*reversed(values.values())))",
        "in a sweep over two keys, each key has the values of the other",
        "tests/unit/launch/test_scripts.py::test_each_run_of_a_sweep_has_its_own_values",
    ),
    Mutation(
        "recipes/core/run/source.py",
        '"read-tree", "HEAD", ',
        '"read-tree", "HEAD^", ',
        "code.diff is the difference from another commit, and the run cannot be reproduced",
        "tests/unit/launch/test_snapshot.py",
    ),
]
