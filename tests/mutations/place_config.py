"""Bugs in places of ranks, host lists, network interfaces, GPUs, keys, profiles and env files."""

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "recipes/core/slurm/environment.py",
        'world_size = number(environ, "SLURM_STEP_NUM_TASKS"',
        'world_size = number(environ, "SLURM_NTASKS"',
        "a small step in a larger job waits for ranks that do not exist",
        "tests/unit/place/test_ranks.py::test_the_rank_is_found_from_the_launchers_variables",
    ),
    Mutation(
        "recipes/core/slurm/environment.py",
        'environ.get("SLURM_STEP_NODELIST", "")',
        'environ.get("SLURM_JOB_NODELIST", "")',
        "a step on the second node of a job looks for rank 0 on the first node",
        "tests/unit/place/test_ranks.py::test_the_rank_is_found_from_the_launchers_variables",
    ),
    Mutation(
        "recipes/core/place/ranks.py",
        "    of_node = tasks[node_rank]\n",
        "    of_node = tasks[0]\n",
        "on uneven nodes, a rank has the number of ranks of the first node",
        "tests/unit/place/test_ranks.py::test_the_rank_is_found_from_the_launchers_variables",
    ),
    Mutation(
        "recipes/core/place/ranks.py",
        '    if "RANK" in environ:\n        return _from_env(environ)\n',
        '    if "RANK" in environ and not environment.in_step(environ):\n'
        "        return _from_env(environ)\n",
        "under torchrun inside srun, all ranks have the number of their srun task",
        "tests/unit/place/test_ranks.py::test_the_rank_is_found_from_the_launchers_variables",
    ),
    Mutation(
        "recipes/core/slurm/environment.py",
        'if "SLURM_STEP_ID" not in environ or step_id(environ) == _BATCH_STEP:',
        "if False:",
        "a recipe in the batch shell without srun trains alone, on one of eight GPUs",
        "tests/unit/place/test_ranks.py::test_contradictory_variables_are_refused_in_one_line",
    ),
    Mutation(
        "recipes/core/place/ranks.py",
        "port_for(environment.job_number(environ), step, restart_count(environ))",
        "port_for(environment.job_number(environ), step, 0)",
        "a requeued job uses its old port, which is in TIME_WAIT",
        "tests/unit/place/test_ranks.py::test_the_rank_is_found_from_the_launchers_variables",
    ),
    Mutation(
        "recipes/core/slurm/environment.py",
        "job = f\"{number(environ, 'SLURM_ARRAY_JOB_ID')}_{number(environ, "
        "'SLURM_ARRAY_TASK_ID')}\"",
        'job = str(number(environ, "SLURM_ARRAY_JOB_ID"))',
        "all tasks of an array write into one run directory",
        "tests/unit/place/test_ranks.py::test_the_rank_is_found_from_the_launchers_variables",
    ),
    Mutation(
        "recipes/core/slurm/hostlist.py",
        'f"{n:0{len(low)}d}" for n',
        'f"{n}" for n',
        "n[008-011] is read as n8 to n11, which do not resolve",
        "tests/unit/slurm/test_hostlist.py",
    ),
    Mutation(
        "recipes/core/slurm/hostlist.py",
        "for item in items for host",
        "for item in sorted(items) for host",
        "the hosts are sorted, and the ranks look for rank 0 on another node",
        "tests/unit/slurm/test_hostlist.py",
    ),
    Mutation(
        "recipes/core/place/network.py",
        "return _towards(info.nodes[1 if info.node_rank == 0 else 0])",
        "return _towards(info.nodes[0])",
        "the ranks of the first node use loopback, and the others cannot reach them",
        "tests/unit/place/test_network.py",
    ),
    Mutation(
        "recipes/core/place/network.py",
        "        if source == address or ipaddress.ip_address(address).is_loopback:\n            "
        "own_address = own_address or address\n            continue\n",
        "",
        "the ranks use docker0, which exists on every node and reaches none",
        "tests/unit/place/test_network.py",
    ),
    Mutation(
        "recipes/core/place/gpus.py",
        'GPUs and torch sees {seen}" if seen < expected else ""',
        'GPUs and torch sees {seen}" if seen < expected // 2 else ""',
        "a node with seven of eight GPUs counts as good",
        "tests/unit/doctor/test_gpus.py "
        "tests/distributed/train/test_device.py::"
        "test_missing_gpus_are_reported_in_one_line_with_host_and_counts",
    ),
    Mutation(
        "recipes/core/place/gpus.py",
        "return granted >= ranks or (granted",
        "return granted >= 1 or (granted",
        "two ranks share one GPU without an error",
        "tests/distributed/train/test_device.py::"
        "test_missing_gpus_are_reported_in_one_line_with_host_and_counts",
    ),
    Mutation(
        "recipes/core/config/key_value.py",
        "return {**from_file, **words}",
        "return {**words, **from_file}",
        "a key in a config= file overrides the typed key",
        "tests/unit/config/test_config.py::test_the_precedence_of_a_recipe_key",
    ),
    Mutation(
        "recipes/core/config/parser.py",
        "absolute({**defaults, **of_dataset, **from_run, **given}, recipe_class)",
        "absolute({**given, **of_dataset, **from_run, **defaults}, recipe_class)",
        "a key in the site's profile overrides the typed key",
        "tests/unit/config/test_config.py::test_the_precedence_of_a_run_key "
        "tests/unit/config/test_config.py::test_the_precedence_of_a_job_key",
    ),
    Mutation(
        "recipes/core/config/parser.py",
        "from_run = {name: value for name, value in of_run.items() if name not in given}",
        "from_run: dict[str, str] = {}",
        "a resumed run takes the default values, not its own values",
        "tests/unit/config/test_config.py",
    ),
    Mutation(
        "recipes/core/config/parser.py",
        "{name: chosen[name] for name in words if name not in job_names}",
        "{name: chosen[name] for name in words if name in declare.names_of(recipe_class)}",
        "run keys such as run_dir= and resume= do not reach the ranks",
        "tests/unit/launch/test_jobs.py::test_paths_are_relative_to_the_folder_of_the_submission",
    ),
    Mutation(
        "recipes/core/config/job_keys.py",
        'if known := next((known for known in ours if known.startswith(name)), ""):',
        'if known := next((known for known in ours if known == name), ""):',
        "extra=--outp=x is accepted, and sbatch sends the log to x",
        "tests/unit/test_bad_input.py::test_launch_refuses_each_invalid_key_in_one_line",
    ),
    Mutation(
        "recipes/core/slurm/durations.py",
        "(int(days or 0) * 24 + hours) * 60",
        "(int(days or 0) * 12 + hours) * 60",
        "time=2-0 requests one day, not two",
        "tests/unit/slurm/test_durations.py::test_a_time_limit_is_read_in_each_form_of_slurm",
    ),
    Mutation(
        "recipes/core/config/envfile.py",
        "added = {name: value for name, value in settings.items() if name not in environ}",
        "added = dict(settings)",
        "an env file overrides a variable that the user exported",
        "tests/unit/config/test_envfile.py",
    ),
    Mutation(
        "recipes/core/config/envfile.py",
        "|(?:CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|",
        "|(?:HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|",
        "an env file can put all ranks of a node on one GPU",
        "tests/unit/config/test_envfile.py",
    ),
    Mutation(
        "recipes/core/config/envfile.py",
        'if any(_SECRET_PART.fullmatch(part) for part in variable.upper().split("_")):',
        "if _SECRET_PART.fullmatch(variable.upper()):",
        "an env file may contain HF_TOKEN, and a log may then show the token",
        "tests/unit/config/test_envfile.py",
    ),
    Mutation(
        "recipes/core/config/job_keys.py",
        "return math.ceil(seconds / 60)",
        "return max(1, round(seconds / 60))",
        "a job gets less time than time= says",
        "tests/unit/config/test_config.py",
    ),
    Mutation(
        "recipes/core/slurm/client.py",
        'next((job for job in jobs if job.number == job_id), Job("", ""))',
        'next(iter(jobs), Job("", ""))',
        "an element of an array takes another one for itself",
        "tests/unit/slurm/test_client.py",
    ),
]
