"""Bugs in signals, the state of a job, the watchdog, the code of a run, and the table of runs."""

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "recipes/core/run/ledger.py",
        '        (number(last.get("time")), "repeated"),\n',
        '        (number(last.get("time")), "training"),\n',
        "the ledger counts steps that were lost as training",
        "tests/unit/run/test_ledger.py::test_the_time_of_a_run_with_a_restart_and_a_requeue",
    ),
    Mutation(
        "recipes/core/run/ledger.py",
        "is_unnoticed = is_requeue and not has_ended",
        "is_unnoticed = False",
        "the ledger takes the minutes until Slurm notices a dead node for time in the queue",
        "tests/unit/run/test_ledger.py::"
        "test_a_node_that_died_with_the_batch_script_is_a_hang_until_the_requeue",
    ),
    Mutation(
        "recipes/core/run/judge.py",
        'stops[0]["time"] <= failures[0]["time"]',
        "True",
        "a program that failed is requeued, since Slurm then signals its other ranks",
        "tests/unit/run/test_judge.py",
    ),
    Mutation(
        "recipes/core/run/watchdog.py",
        "            since = moment\n",
        "",
        "a healthy run is ended once it has trained for timeout_s",
        "tests/unit/run/test_watchdog.py::test_beats_that_are_slower_than_the_polls_are_progress",
    ),
    Mutation(
        "recipes/core/slurm/client.py",
        "if not OF_COMMANDS.match(name)",
        "if name",
        "with SQUEUE_PARTITION in a user's shell, a running job is submitted twice",
        "tests/unit/slurm/test_client.py",
    ),
    Mutation(
        "recipes/core/place/memory.py",
        "{name} {before + task}",
        "{name} {task}",
        "with several nodes, the peak memory of a rank is shown for another rank",
        "tests/unit/place/test_memory.py",
    ),
    Mutation(
        "recipes/core/place/memory.py",
        "count_kills(self.cgroup) > self.kills",
        "count_kills(self.cgroup) > 0",
        "a rank that failed by itself is said to have used up its memory, "
        "since an earlier process of its cgroup did",
        "tests/unit/place/test_memory.py",
    ),
    Mutation(
        "recipes/core/run/signals.py",
        "margin = min(stop_before_s, SHARE * known)",
        "margin = min(stop_before_s - 600, SHARE * known)",
        "the run stops 10 minutes late, after the end of its job",
        "tests/unit/run/test_signals.py",
    ),
    Mutation(
        "recipes/core/slurm/jobstate.py",
        "return self.limit_s - self.run_s",
        "return self.limit_s",
        "the time left is read as the whole time limit, and the job ends without a checkpoint",
        "tests/unit/slurm/test_client.py::"
        "test_the_time_left_is_the_controllers_else_that_of_the_jobs_environment",
    ),
    Mutation(
        "recipes/core/run/signals.py",
        "known = known - wait if now is None else now",
        "known = known if now is None else now",
        "if the controller does not answer, the job reaches its time limit without a checkpoint",
        "tests/unit/run/test_signals.py",
    ),
    Mutation(
        "recipes/core/slurm/jobstate.py",
        'if array and task else fields["JobId"]',
        'if False else fields["JobId"]',
        "an array task has an id that scancel does not know",
        "tests/unit/slurm/test_client.py::test_each_job_that_scontrol_prints_is_parsed",
    ),
    Mutation(
        "recipes/core/slurm/jobstate.py",
        "if self.waiting or self.restarts > restarts:",
        "if self.waiting:",
        "a job that Slurm requeues counts as cancelled",
        "tests/unit/launch/test_batch.py::test_a_job_whose_end_slurm_has_decided_is_not_requeued",
    ),
    Mutation(
        "recipes/core/run/record.py",
        "if is_done else {}",
        "if status else {}",
        "the table shows a failed run with the accuracy of an earlier attempt",
        "tests/unit/run/test_table.py",
    ),
    Mutation(
        "recipes/core/run/in_use.py",
        "if not other or other.ended or (",
        'if not other or other.ended or other.state != "RUNNING" or (',
        "a second job takes over the run directory of a suspended or requeued job",
        "tests/slurm/test_second_job.py",
    ),
    Mutation(
        "recipes/core/run/judge.py",
        "    if by_parent and by_parent.kind is Kind.killed:",
        "    if False:",
        "a rank that lost its killed peer is named in its place",
        "tests/unit/run/test_judge.py",
    ),
    Mutation(
        "recipes/core/run/attempt.py",
        "            _remove(earlier.staging)\n",
        "            pass\n",
        "a rank of an earlier attempt that wakes up replaces a checkpoint of its successor",
        "tests/unit/run/test_attempt.py",
    ),
    Mutation(
        "recipes/core/train/session.py",
        "        signals.keep_from_workers()\n",
        "",
        "a run whose DataLoader has workers loses its work at every signal of Slurm",
        "tests/faults/test_signals.py",
    ),
    Mutation(
        "recipes/core/trust.py",
        "is_sticky = is_above and status.st_mode & stat.S_ISVTX",
        "is_sticky = True",
        "an env file that every user can write to chooses what is loaded",
        "tests/unit/test_other_users.py",
    ),
    Mutation(
        "recipes/core/trust.py",
        "if is_above and not status.st_mode & 0o011:",
        "if is_above and not status.st_mode & 0o001:",
        "a folder that a group can enter is taken for closed",
        "tests/unit/test_other_users.py",
    ),
    Mutation(
        "recipes/core/trust.py",
        "group == clone.st_gid and clone.st_mode & 0o020",
        "group == clone.st_gid",
        "a group is trusted although it cannot change the clone",
        "tests/unit/test_other_users.py",
    ),
    Mutation(
        "recipes/core/run/watchdog.py",
        "elif moment - since > limit_s:",
        "elif moment - since > 60 * limit_s:",
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
        "        dict(zip(values, chosen, strict=True)) for chosen in "
        "itertools.product(*values.values())",
        "        dict(zip(values, chosen, strict=True))\n        for chosen in "
        "itertools.product(*reversed(values.values()))",
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
