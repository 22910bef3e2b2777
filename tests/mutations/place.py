"""Bugs in who and where a process is: ranks, host lists, the network interface, GPUs, env files."""

from tests.mutations import Mutation

RANKS = "tests/unit/test_ranks.py"
HOSTS = "tests/unit/test_hostlist.py"
NETWORK = "tests/unit/test_network.py"
GPUS = "tests/unit/doctor/test_probe_gpus.py"
ENVFILE = "tests/unit/test_envfile.py"
DEVICE = "tests/distributed/test_device.py"

MUTATIONS = [
    *(
        Mutation("recipes/core/place/ranks.py", old, new, bug, f"{RANKS}::test_detect")
        for old, new, bug in (
            (
                'tasks_name = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")',
                'tasks_name = _first_set(environ, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")',
                "a small step in a larger job waits for ranks that are not there",
            ),
            (
                '_first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")',
                '_first_set(environ, "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")',
                "a step on the job's second node looks for rank 0 on the first",
            ),
            (
                '_first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")',
                '_first_set(environ, "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")',
                "a step of fewer tasks than its job is refused",
            ),
            (
                '_first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")',
                '_first_set(environ, "SLURM_NNODES", "SLURM_STEP_NUM_NODES")',
                "a step on fewer nodes than its job is refused",
            ),
            (
                '    if "RANK" in environ:\n        return _from_env(environ)\n',
                '    if "RANK" in environ and not in_step(environ):\n        return _from_env(environ)\n',
                "ranks of torchrun inside srun all take the number of their srun task",
            ),
            (
                "master_addr or layout.nodes[0], master_port or port",
                "master_addr or layout.nodes[-1], master_port or port",
                "the ranks look for rank 0 on the last node",
            ),
            (
                "master_addr or layout.nodes[0], master_port or port",
                "layout.nodes[0], master_port or port",
                "a MASTER_ADDR that the user has set is ignored under srun",
            ),
            (
                "master_addr or layout.nodes[0], master_port or port",
                "master_addr or layout.nodes[0], port",
                "a MASTER_PORT that the user has set is ignored under srun",
            ),
            (
                "port_for(_job_id(environ), _step_id(environ), _restart_count(environ))",
                "port_for(_job_id(environ), 0, _restart_count(environ))",
                "two steps side by side in a job meet on one port",
            ),
            (
                "port_for(_job_id(environ), _step_id(environ), _restart_count(environ))",
                "port_for(_job_id(environ), _step_id(environ), 0)",
                "a requeued job finds its old port in TIME_WAIT",
            ),
            (
                "return _Layout(rank, local_rank, node_rank, world_size, counts[node_rank], len(nodes), tuple(nodes))",
                "return _Layout(rank, local_rank, node_rank, world_size, counts[0], len(nodes), tuple(nodes))",
                "on uneven nodes a rank counts the first node's ranks as its node's",
            ),
            (
                "return ordered, [count_of[node] for node in ordered]",
                "return nodes, counts",
                "in a heterogeneous job the ranks look for rank 0 on another node",
            ),
            (
                "return rank // local_size, world_size // local_size",
                "return rank % local_size, world_size // local_size",
                "mpirun's ranks of a second node say that they are on the first",
            ),
            (
                "return sum(_number(environ, name, default=0) for name in names)",
                "return max(_number(environ, name, default=0) for name in names)",
                "a torchrun restart in a requeued job reuses a restart's number",
            ),
            (
                "job = f\"{_number(environ, 'SLURM_ARRAY_JOB_ID')}_{_number(environ, 'SLURM_ARRAY_TASK_ID')}\"",
                'job = str(_number(environ, "SLURM_ARRAY_JOB_ID"))',
                "all tasks of an array write into one run directory",
            ),
            (
                'return f"{job}.{step}" if step else job',
                "return job",
                "two steps of a job write into one run directory",
            ),
            (
                "return _step_id(environ) < _FIRST_RESERVED_STEP",
                "return True",
                "a command in the shell of an interactive job waits for other ranks",
            ),
            (
                'address = given[1:-1] if given.startswith("[") and given.endswith("]") else given',
                "address = given",
                "MASTER_ADDR=[fd00::1] is refused",
            ),
            (
                "if any(environ[mine] != environ.get(slurms) for mine, slurms in pairs if mine in environ):",
                "if False:",
                "mpiexec's ranks inside a step take the numbers of its proxies",
            ),
        )
    ),
    Mutation(
        "recipes/core/place/ranks.py",
        "    if in_batch_shell(environ):\n",
        "    if False:\n",
        "a recipe in the batch shell without srun trains alone on one of eight GPUs",
        f"{RANKS}::test_contradictions_are_one_clear_line",
    ),
    Mutation(
        "recipes/core/place/ranks.py",
        "_BATCH_STEPS = (0xFFFFFFFB, 0xFFFFFFFE)",
        "_BATCH_STEPS = (0xFFFFFFFE,)",
        "the same on Slurm from 26.05 on, which numbers the batch step",
        f"{RANKS}::test_contradictions_are_one_clear_line",
    ),
    Mutation(
        "recipes/core/place/ranks.py",
        "return 10_000 + (84 * job_id + 4 * step_id + restart_count) % 22_768",
        "return 10_000 + (84 * job_id + step_id + restart_count) % 22_768",
        "a restarted step takes the port of the step beside it",
        f"{RANKS}::test_ports_of_neighbouring_jobs_steps_and_restarts_differ",
    ),
    Mutation(
        "recipes/core/place/ranks.py",
        "(84 * job_id + 4 * step_id + restart_count) % 22_768",
        "(84 * job_id + 4 * step_id + restart_count) % 32_768",
        "a port in the ephemeral range is in use already, now and then",
        f"{RANKS}::test_ports_of_neighbouring_jobs_steps_and_restarts_differ",
    ),
    Mutation(
        "recipes/core/place/ranks.py",
        "    if sum(counts) != world_size:\n",
        "    if sum(counts) < world_size:\n",
        "variables of an outer job are taken for the step's",
        f"{RANKS}::test_contradictions_are_one_clear_line",
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
        "the last node of each range is forgotten",
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
        "hosts are sorted: rank 0 is looked for on another node",
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
        "the first node's ranks talk over loopback and the others never reach them",
        NETWORK,
    ),
    Mutation(
        "recipes/core/place/network.py",
        '"NCCL_SOCKET_IFNAME": f"={choice.interface}"',
        '"NCCL_SOCKET_IFNAME": choice.interface',
        "NCCL takes eth0 for a prefix and uses eth01 too",
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
        "for address in _resolve(master) if address in carriers and not _is_loopback(address)]",
        "for address in _resolve(master) if address in carriers]",
        "on Debian the master's node binds to 127.0.1.1 and the others hang",
        NETWORK,
    ),
    Mutation(
        "recipes/core/place/network.py",
        "        except NetworkError as error:\n            failures.append(error.what)\n            continue\n",
        "        except NetworkError as error:\n            raise error\n",
        "a peer whose first address has no route is given up although its second has one",
        NETWORK,
    ),
    # GPUs
    Mutation(
        "recipes/core/place/gpus.py",
        'GPUs and torch sees {seen}" if seen < expected else ""',
        'GPUs and torch sees {seen}" if seen < expected // 2 else ""',
        "a node with seven of eight GPUs passes",
        f"{GPUS} {DEVICE}::test_missing_gpus_are_one_line_with_host_and_counts",
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
        f"{DEVICE}::test_missing_gpus_are_one_line_with_host_and_counts",
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
        "a GPU that somebody else fills to the half passes",
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
        "a wrapper's ROCR_VISIBLE_DEVICES=3 beside Slurm's list counts as four GPUs",
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
        "a variable that the user has set to nothing is set again",
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
        "recipes/core/config/envfile.py",
        "    for layer in layers:\n",
        "    for layer in reversed(layers):\n",
        "common.env overrides the site's env files",
        f"{ENVFILE} {'tests/unit/test_config.py'}::test_env_files_of_network_and_site",
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
        "an env file can change what each srun asks for",
        ENVFILE,
    ),
    Mutation(
        "recipes/core/config/envfile.py",
        'return any(_SECRET_PART.fullmatch(part) for part in name.upper().split("_"))',
        "return bool(_SECRET_PART.fullmatch(name.upper()))",
        "an env file may hold HF_TOKEN, and a key may take its value into a log",
        ENVFILE,
    ),
    Mutation(
        "env/ethernet.env",
        "NCCL_IB_DISABLE=1",
        "NCCL_IB_DISABLE=0",
        "network=ethernet talks over InfiniBand cards that have no cable",
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
