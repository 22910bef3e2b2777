"""Bugs in who and where a process is: ranks, host lists, the network interface, GPUs, env files."""

from tests.mutations import Mutation

RANKS_PY = "recipes/core/place/ranks.py"
STEP_PY = "recipes/core/place/slurm_step.py"
VARIABLES_PY = "recipes/core/place/launcher_variables.py"
RANKS = "tests/unit/place/test_ranks.py"
HOSTS = "tests/unit/place/test_hostlist.py"
NETWORK = "tests/unit/place/test_network.py"
GPUS = "tests/unit/doctor/test_probe_gpus.py"
ENVFILE = "tests/unit/config/test_envfile.py"
DEVICE = "tests/distributed/train/test_device.py"

MUTATIONS = [
    *(
        Mutation(file, old, new, bug, f"{RANKS}::test_the_rank_is_found_from_the_launchers_variables")
        for file, old, new, bug in (
            (
                STEP_PY,
                'tasks_name = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")',
                'tasks_name = first_set(environ, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")',
                "a small step in a larger job waits for ranks that do not exist",
            ),
            (
                STEP_PY,
                'first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")',
                'first_set(environ, "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")',
                "a step on the job's second node looks for rank 0 on the first",
            ),
            (
                STEP_PY,
                'first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")',
                'first_set(environ, "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")',
                "a step of fewer tasks than its job is refused",
            ),
            (
                STEP_PY,
                'first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")',
                'first_set(environ, "SLURM_NNODES", "SLURM_STEP_NUM_NODES")',
                "a step on fewer nodes than its job is refused",
            ),
            (
                RANKS_PY,
                '    if "RANK" in environ:\n        return _from_env(environ)\n',
                '    if "RANK" in environ and not in_step(environ):\n        return _from_env(environ)\n',
                "ranks of torchrun inside srun all take the number of their srun task",
            ),
            (
                RANKS_PY,
                "master_addr or layout.nodes[0], master_port or port",
                "master_addr or layout.nodes[-1], master_port or port",
                "the ranks look for rank 0 on the last node",
            ),
            (
                RANKS_PY,
                "master_addr or layout.nodes[0], master_port or port",
                "layout.nodes[0], master_port or port",
                "a MASTER_ADDR that the user has set is ignored under srun",
            ),
            (
                RANKS_PY,
                "master_addr or layout.nodes[0], master_port or port",
                "master_addr or layout.nodes[0], port",
                "a MASTER_PORT that the user has set is ignored under srun",
            ),
            (
                RANKS_PY,
                "port_for(job_id(environ), step_id(environ), restart_count(environ))",
                "port_for(job_id(environ), 0, restart_count(environ))",
                "two simultaneous steps of a job use the same port",
            ),
            (
                RANKS_PY,
                "port_for(job_id(environ), step_id(environ), restart_count(environ))",
                "port_for(job_id(environ), step_id(environ), 0)",
                "a requeued job finds its old port in TIME_WAIT",
            ),
            (
                STEP_PY,
                "return Layout(rank, local_rank, node_rank, world_size, counts[node_rank], len(nodes), tuple(nodes))",
                "return Layout(rank, local_rank, node_rank, world_size, counts[0], len(nodes), tuple(nodes))",
                "on uneven nodes a rank counts the first node's ranks as its node's",
            ),
            (
                STEP_PY,
                "return ordered, [count_of[node] for node in ordered]",
                "return nodes, counts",
                "in a heterogeneous job the ranks look for rank 0 on another node",
            ),
            (
                RANKS_PY,
                "return rank // local_size, world_size // local_size",
                "return rank % local_size, world_size // local_size",
                "the ranks of mpirun on a second node count as ranks of the first",
            ),
            (
                STEP_PY,
                "return sum(number(environ, name, default=0) for name in names)",
                "return max(number(environ, name, default=0) for name in names)",
                "a torchrun restart in a requeued job has the number of an earlier restart",
            ),
            (
                RANKS_PY,
                "job = f\"{number(environ, 'SLURM_ARRAY_JOB_ID')}_{number(environ, 'SLURM_ARRAY_TASK_ID')}\"",
                'job = str(number(environ, "SLURM_ARRAY_JOB_ID"))',
                "all tasks of an array write into one run directory",
            ),
            (
                RANKS_PY,
                'return f"{job}.{step}" if step else job',
                "return job",
                "two steps of a job write into one run directory",
            ),
            (
                STEP_PY,
                "return step_id(environ) < _FIRST_RESERVED_STEP",
                "return True",
                "a command in the shell of an interactive job waits for other ranks",
            ),
            (
                VARIABLES_PY,
                'address = given[1:-1] if given.startswith("[") and given.endswith("]") else given',
                "address = given",
                "MASTER_ADDR=[fd00::1] is refused",
            ),
            (
                STEP_PY,
                "if any(environ[mine] != environ.get(slurms) for mine, slurms in pairs if mine in environ):",
                "if False:",
                "mpiexec's ranks inside a step take the numbers of its proxies",
            ),
        )
    ),
    Mutation(
        RANKS_PY,
        "    if in_batch_shell(environ):\n",
        "    if False:\n",
        "a recipe in the batch shell without srun trains alone on one of eight GPUs",
        f"{RANKS}::test_contradictory_variables_are_refused_in_one_line",
    ),
    Mutation(
        STEP_PY,
        "_BATCH_STEPS = (0xFFFFFFFB, 0xFFFFFFFE)",
        "_BATCH_STEPS = (0xFFFFFFFE,)",
        "the same with Slurm 26.05 and later, which number the batch step",
        f"{RANKS}::test_contradictory_variables_are_refused_in_one_line",
    ),
    Mutation(
        RANKS_PY,
        "return 10_000 + (84 * job + 4 * step + restarts) % 22_768",
        "return 10_000 + (84 * job + step + restarts) % 22_768",
        "a restarted step uses the port of another step",
        f"{RANKS}::test_ports_of_neighbouring_jobs_steps_and_restarts_differ",
    ),
    Mutation(
        RANKS_PY,
        "(84 * job + 4 * step + restarts) % 22_768",
        "(84 * job + 4 * step + restarts) % 32_768",
        "the port is in the ephemeral range, and is sometimes in use already",
        f"{RANKS}::test_ports_of_neighbouring_jobs_steps_and_restarts_differ",
    ),
    Mutation(
        STEP_PY,
        "    if sum(counts) != world_size:\n",
        "    if sum(counts) < world_size:\n",
        "variables of an outer job are used for the step",
        f"{RANKS}::test_contradictory_variables_are_refused_in_one_line",
    ),
    # host lists
    Mutation(
        "recipes/core/place/hostlist.py",
        'f"{n:0{width}d}" for n in range(low, high + 1)',
        'f"{n}" for n in range(low, high + 1)',
        "n[008-011] is read as n8 to n11, which do not resolve",
        HOSTS,
    ),
    Mutation(
        "recipes/core/place/hostlist.py",
        "for n in range(low, high + 1)) for",
        "for n in range(low, high)) for",
        "the last node of each range is missing",
        HOSTS,
    ),
    Mutation(
        "recipes/core/place/hostlist.py",
        "return low, high, len(ends[0])",
        "return low, high, len(ends[-1])",
        "n[9-11] is read as n09 to n11",
        HOSTS,
    ),
    Mutation(
        "recipes/core/place/hostlist.py",
        'map("".join, product(*map(_values, item)))]',
        'map("".join, zip(*map(_values, item)))]',
        "rack[1-2]n[1-3] is read as two nodes",
        HOSTS,
    ),
    Mutation(
        "recipes/core/place/hostlist.py",
        "return [host for item in items for host",
        "return [host for item in sorted(items, key=str) for host",
        "hosts are sorted, so rank 0 is expected on another node",
        HOSTS,
    ),
    Mutation(
        "recipes/core/place/hostlist.py",
        "return [count for count, times in runs for _ in range(times)]",
        "return [count for count, times in runs for _ in range(min(times, 2))]",
        "2(x3),1 is read as three nodes",
        HOSTS,
    ),
    # network
    Mutation(
        "recipes/core/place/network.py",
        "return _towards(info.nodes[1 if info.node_rank == 0 else 0])",
        "return _towards(info.nodes[0])",
        "the ranks of the first node use loopback, and the others cannot reach them",
        NETWORK,
    ),
    Mutation(
        "recipes/core/place/network.py",
        '"NCCL_SOCKET_IFNAME": f"={choice.interface}"',
        '"NCCL_SOCKET_IFNAME": choice.interface',
        "NCCL reads eth0 as a prefix, and uses eth01 too",
        NETWORK,
    ),
    Mutation(
        "recipes/core/place/network.py",
        "return {name: value for name, value in names.items() if name not in environ}",
        "return names",
        "an interface that the user has set is overridden",
        NETWORK,
    ),
    Mutation(
        "recipes/core/place/network.py",
        "        if route.local:\n            own.append(address)\n            continue\n",
        "",
        "a docker0 that every node has is chosen: no route to host",
        NETWORK,
    ),
    Mutation(
        "recipes/core/place/network.py",
        "for address in _resolve(master) if address in interface_of and not is_loopback(address)]",
        "for address in _resolve(master) if address in interface_of]",
        "on Debian the master's node binds to 127.0.1.1 and the others hang",
        NETWORK,
    ),
    Mutation(
        "recipes/core/place/network.py",
        "        except NetworkError as error:\n            failures.append(error.what)\n            continue\n",
        "        except NetworkError as error:\n            raise error\n",
        "a peer is reported as unreachable although its second address has a route",
        NETWORK,
    ),
    # GPUs
    Mutation(
        "recipes/core/place/gpus.py",
        'GPUs and torch sees {seen}" if seen < expected else ""',
        'GPUs and torch sees {seen}" if seen < expected // 2 else ""',
        "a node with seven of eight GPUs counts as good",
        f"{GPUS} {DEVICE}::test_missing_gpus_are_reported_in_one_line_with_host_and_counts",
    ),
    Mutation(
        "recipes/core/place/gpus.py",
        "return granted >= ranks or (granted == 0 and named is not None and named[1] == 1)",
        "return granted >= ranks",
        "a rank whose wrapper shows it one GPU is refused",
        f"{DEVICE}::test_a_rank_takes_its_gpu",
    ),
    Mutation(
        "recipes/core/place/gpus.py",
        "return granted >= ranks or (granted",
        "return granted >= 1 or (granted",
        "two ranks share one GPU without an error",
        f"{DEVICE}::test_missing_gpus_are_reported_in_one_line_with_host_and_counts",
    ),
    Mutation(
        "recipes/core/place/gpus.py",
        'environ.get("SLURM_GPUS_ON_NODE", "")',
        'environ.get("SLURM_GPUS", "")',
        "the GPUs of the whole job are expected on each node",
        f"{GPUS}",
    ),
    Mutation(
        "recipes/core/doctor/probe_gpus.py",
        'if gpu.get("free", 0) < FREE_SHARE * gpu.get("total", 0):',
        'if gpu.get("free", 0) < (1 - FREE_SHARE) * gpu.get("total", 0):',
        "a GPU whose memory another user has half filled counts as good",
        GPUS,
    ),
    Mutation(
        "recipes/core/doctor/probe_gpus.py",
        "if info.local_world_size > 1 and near and allowed and not near & allowed:",
        "if info.local_world_size > 1 and near and allowed and not near <= allowed:",
        "every rank with fewer CPUs than a socket is reported as far from its GPU",
        GPUS,
    ),
    Mutation(
        "recipes/core/place/gpus.py",
        "return min(counts, key=lambda one: one[1], default=None)",
        "return max(counts, key=lambda one: one[1], default=None)",
        "ROCR_VISIBLE_DEVICES=3, set by a wrapper in addition to Slurm's list, counts as four GPUs",
        f"{DEVICE}::test_a_rank_takes_its_gpu",
    ),
    # env files
    Mutation(
        "recipes/core/config/envfile.py",
        "added = {name: value for name, value in settings.items() if name not in environ}",
        "added = dict(settings)",
        "an env file overrides what the user has exported",
        ENVFILE,
    ),
    Mutation(
        "recipes/core/config/envfile.py",
        "added = {name: value for name, value in settings.items() if name not in environ}",
        "added = {name: value for name, value in settings.items() if not environ.get(name)}",
        "an empty variable of the user is overridden",
        ENVFILE,
    ),
    Mutation(
        "recipes/core/config/envfile.py",
        "return files + [root / site_file for site_file in site_files]",
        "return [files[0], *(root / site_file for site_file in site_files), *files[1:]]",
        "the fabric's env file overrides the site's",
        ENVFILE,
    ),
    Mutation(
        "recipes/core/config/profiles.py",
        "    for file in files:\n",
        "    for file in reversed(files):\n",
        "common.env overrides the site's env files",
        "tests/unit/config/test_config.py::test_the_sites_env_file_overrides_the_networks",
    ),
    Mutation(
        "recipes/core/config/envfile.py",
        'r"(?:CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL"',
        'r"(?:HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL"',
        "an env file can put all ranks of a node on one GPU",
        ENVFILE,
    ),
    Mutation(
        "recipes/core/config/envfile.py",
        'r"(?:SLURM|SLURMD|SBATCH|SRUN|SALLOC)_\\w+"',
        'r"(?:SLURM|SLURMD|SBATCH|SALLOC)_\\w+"',
        "an env file can change what each srun requests",
        ENVFILE,
    ),
    Mutation(
        "recipes/core/config/envfile.py",
        'return any(_SECRET_PART.fullmatch(part) for part in name.upper().split("_"))',
        "return bool(_SECRET_PART.fullmatch(name.upper()))",
        "an env file may contain HF_TOKEN, whose value can then reach a log",
        ENVFILE,
    ),
    Mutation(
        "env/ethernet.env",
        "NCCL_IB_DISABLE=1",
        "NCCL_IB_DISABLE=0",
        "network=ethernet uses InfiniBand cards without a cable",
        ENVFILE,
    ),
    Mutation(
        "env/slingshot.env",
        "NCCL_NET_GDR_LEVEL=PHB",
        "NCCL_IB_GDR_LEVEL=PHB",
        "a fabric's file sets a name that NCCL no longer reads",
        ENVFILE,
    ),
]
