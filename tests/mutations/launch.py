"""Bugs in submission, the batch script, requeues, the copy of the code, containers and
launcher=local.
"""

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "recipes/core/launch/batch.py",
        "options = [*spec.step, *following.options]",
        "options = [*following.options]",
        "a restart starts the ranks outside their container",
        "tests/unit/launch/test_batch.py",
    ),
    Mutation(
        "recipes/core/launch/unpack.py",
        'part = folder.with_name(f".{folder.name}")',
        "part = folder",
        "what a killed job has unpacked is used as an environment by the next one",
        "tests/unit/launch/test_unpack.py",
    ),
    Mutation(
        "recipes/core/launch/run_commands.py",
        'arguments += [f"run_dir={run.folder}", *words]',
        'arguments = [*words, *arguments, f"run_dir={run.folder}"]',
        "resume epochs=20 submits the old number of epochs",
        "tests/unit/launch/test_runs.py",
    ),
    Mutation(
        "recipes/core/launch/runs.py",
        "if each not in copied]",
        "]",
        "cancelling a copy of a run cancels the job of the run",
        "tests/unit/launch/test_runs.py",
    ),
    Mutation(
        "sbatch/job.sh",
        '    exec srun "$@" &\n    ranks=$!',
        '    command srun "$@"\n    return\n    ranks=$!',
        "a signal that only the batch shell receives does not reach the ranks",
        "tests/unit/launch/test_job_sh.py::"
        "test_a_signal_that_only_the_batch_shell_receives_reaches_the_ranks",
    ),
    Mutation(
        "sbatch/job.sh",
        "        code=$had\n",
        "",
        "a requeued job runs code that was edited later",
        "tests/unit/launch/test_job_sh.py::"
        "test_a_requeued_job_runs_the_same_code_with_the_same_paths",
    ),
    Mutation(
        "sbatch/job.sh",
        'batch finish "$1" "$2"',
        'batch finish "$1" 0',
        "a job whose step failed before its run began has the state COMPLETED",
        "tests/unit/launch/test_job_sh.py::test_the_batch_status_is_the_runs_status",
    ),
    Mutation(
        "recipes/core/launch/jobs.py",
        '"constraint", "exclude", "reservation", "dependency")',
        '"constraint", "reservation", "dependency")',
        "exclude= has no effect, and the job runs on the bad node",
        "tests/unit/launch/test_scripts.py::test_each_job_key_becomes_an_option_of_sbatch",
    ),
    Mutation(
        "recipes/core/launch/jobs.py",
        'elements = [{**run, "run_dir": f"{parent}/{number}"}',
        'elements = [{**run, "run_dir": f"{parent}"}',
        "all runs of a sweep write into one run directory",
        "tests/unit/launch/test_jobs.py::test_each_run_of_a_sweep_has_its_own_folder",
    ),
    Mutation(
        "recipes/core/slurm/script.py",
        'STEP_OPTIONS = ("--export=ALL", "--kill-on-bad-exit=1", "--wait=60", "--mem=0")',
        'STEP_OPTIONS = ("--export=ALL", "--wait=60", "--mem=0")',
        "after the death of one rank, the others wait until the time limit",
        "tests/unit/launch/test_scripts.py::test_a_finished_script",
    ),
    Mutation(
        "recipes/core/slurm/environment.py",
        "    return {\n        name: value\n        for name, value in environ.items()\n        if "
        "name in kept or not OF_LAUNCHERS.fullmatch(name)\n    }",
        "    return {name: value for name, value in environ.items() if not "
        "OF_LAUNCHERS.fullmatch(name)}",
        "SLURM_CONF and SBATCH_ACCOUNT are removed, and sbatch finds no cluster or the wrong "
        "account",
        "tests/unit/slurm/test_environment.py::"
        "test_clean_environment_keeps_the_variables_of_users_and_sites",
    ),
    Mutation(
        "recipes/core/slurm/environment.py",
        "kept = {name for name, option in SET_FOR_SBATCH.items() if option not in options}",
        "kept = set(SET_FOR_SBATCH)",
        "an exported SBATCH_PARTITION overrides partition=",
        "tests/unit/slurm/test_environment.py::test_an_option_of_the_job_removes_its_variable",
    ),
    Mutation(
        "recipes/core/launch/submit.py",
        "os.umask(0o077))",
        "os.umask(0))",
        "other users can read and change the pickles that a job runs",
        "tests/unit/launch/test_submit.py::"
        "test_the_run_directory_has_the_script_and_the_description",
    ),
    Mutation(
        "recipes/core/launch/submit.py",
        "return directory.exit_code(status, code) or EXIT_CRASH",
        "return code",
        "wait=true returns 0 for a cancelled job",
        "tests/unit/launch/test_waiting.py::test_waiting_returns_the_jobs_exit_status",
    ),
    Mutation(
        "recipes/core/launch/batch.py",
        '    """\n    job_id = environment.job_id(environ)',
        '    """\n    job_id = environ["SLURM_JOB_ID"]',
        "an array task requeues another task of its array",
        "tests/unit/launch/test_batch.py::test_an_array_task_requeues_only_itself",
    ),
    Mutation(
        "recipes/core/launch/batch.py",
        "decided = None if job.is_over_time else job.after_start(restarts)",
        "decided = None",
        "a cancelled job is requeued",
        "tests/unit/launch/test_batch.py::test_a_job_whose_end_slurm_has_decided_is_not_requeued",
    ),
    Mutation(
        "recipes/core/launch/batch.py",
        "restarts and first.number and not saves.has_progress(first, step)",
        "False",
        "a job that completes no step is requeued max_requeues= times",
        "tests/unit/launch/test_batch.py::test_a_job_without_progress_is_not_requeued",
    ),
    Mutation(
        "recipes/core/launch/examination.py",
        "    if count >= most:\n",
        "    if count > most + 99:\n",
        "a job on bad nodes is requeued without end",
        "tests/unit/launch/test_examination.py::test_max_resubmits_limits_the_requeues",
    ),
    Mutation(
        "recipes/core/launch/cli.py",
        '        variables = {**job.variables, "RECIPES_CODE": str(snapshot.take(ROOT))}\n',
        "        snapshot.take(ROOT)\n        variables = job.variables\n",
        "a submitted job runs code that was edited later",
        "tests/unit/launch/test_cli.py::test_a_submission_takes_a_snapshot_and_prints_its_paths",
    ),
    Mutation(
        "recipes/core/launch/cli.py",
        "    return recipe or memory or disk or slurm\n",
        "    return recipe\n",
        "check returns 0 for a job that Slurm refuses",
        "tests/unit/launch/test_cli.py::test_check_returns_the_status_of_the_failed_part",
    ),
    Mutation(
        "recipes/core/launch/cli.py",
        "    not_checked = checks.find_data(settings, ROOT)\n",
        '    not_checked = ""\n',
        "a job whose data is missing is submitted",
        "tests/unit/launch/test_cli.py::test_a_job_whose_data_is_missing_is_not_submitted",
    ),
    Mutation(
        "recipes/core/launch/container.py",
        '    added[f"{runtime}_NO_EVAL"] = "1"\n',
        "",
        "a shell in the container runs a command that is in the value of a variable",
        "tests/unit/launch/test_container.py",
    ),
    Mutation(
        "recipes/core/launch/local.py",
        "before = sum(layout.ranks[: layout.node_rank])",
        "before = layout.node_rank * layout.ranks[layout.node_rank]",
        "on uneven machines two ranks have the same number, and the rendezvous hangs",
        "tests/unit/place/test_ranks.py::"
        "test_ranks_of_the_local_launcher_have_the_places_that_it_gave_them",
    ),
    Mutation(
        "recipes/core/launch/local.py",
        "deadline = now() + PEERS_GRACE_S\n            elif",
        "deadline = math.inf\n            elif",
        "after the death of one rank, the others run without end",
        "tests/distributed/launch/test_local.py::"
        "test_a_failed_rank_ends_the_others_and_is_reported",
    ),
    Mutation(
        "recipes/core/launch/restart.py",
        "        if failures and not asking:\n",
        "        if not asking:\n",
        "a restart trusts the answers that the nodes gave at the start of the step",
        "tests/unit/launch/test_restart.py::test_nodes_are_asked_only_after_a_failure",
    ),
    Mutation(
        "recipes/core/launch/restart.py",
        "    wanted = len(nodes) - run.spare\n",
        "    wanted = len(nodes)\n",
        "a spare node never replaces another one",
        "tests/unit/launch/test_restart.py::test_a_restart_uses_good_nodes",
    ),
    Mutation(
        "recipes/core/launch/restart.py",
        "    excluded |= bad\n",
        "    excluded = bad\n",
        "a node that was bad once is used again by the next restart",
        "tests/unit/launch/test_restart.py::test_a_node_that_was_left_out_stays_out",
    ),
    Mutation(
        "recipes/core/launch/restart.py",
        "    if len(last) <= GAINLESS:\n",
        "    if True:\n",
        "a program that always fails is started again restarts= times",
        "tests/unit/launch/test_restart.py::test_restarts_end_at_their_number_and_without_progress",
    ),
    Mutation(
        "recipes/core/launch/unpack.py",
        "            shutil.rmtree(part, ignore_errors=True)\n            part.mkdir()\n",
        "            part.mkdir()\n",
        "after a job was killed while it unpacked, no job can use environment= on that node",
        "tests/unit/launch/test_unpack.py",
    ),
    Mutation(
        "recipes/core/launch/run_commands.py",
        "        of_run = functools.partial(of_run, jobs=client.mine())\n",
        "",
        "runs watch shows the queue as it was at its start",
        "tests/unit/launch/test_runs.py::test_a_watched_table_asks_slurm_again_each_time",
    ),
    Mutation(
        "recipes/core/launch/jobs.py",
        "        return ranks or gpus or 1\n",
        "        return gpus or ranks or 1\n",
        "on CPUs, the profile's number of GPUs replaces ranks_per_node=",
        "tests/unit/launch/test_jobs.py",
    ),
    Mutation(
        "recipes/core/launch/local.py",
        "number = sum(layout.ranks[: layout.node_rank]) + first",
        "number = layout.node_rank * len(ranks) + first",
        "a rank that fails on a later machine is reported with the number of another rank",
        "tests/unit/place/test_ranks.py",
    ),
]
