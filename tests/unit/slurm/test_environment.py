"""Variables that an outer allocation left."""

import pytest

from recipes.core.slurm import environment
from recipes.core.slurm.jobstate import Job
from tests.unit.launch.stand_ins import describe


def assignments(text: str) -> dict[str, str]:
    """The variables in words such as ``NAME=value``."""
    return dict(word.split("=", 1) for word in text.split())


# Variables of another job in which job 7 was submitted, recorded with Slurm 22.05.
@pytest.mark.parametrize(
    ("is_array", "is_first_start", "environ", "unset"),
    [
        (
            False,
            True,
            "SLURM_ARRAY_JOB_ID=5 SLURM_ARRAY_TASK_ID=4",
            "SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID",
        ),
        (True, True, "SLURM_ARRAY_JOB_ID=5 SLURM_ARRAY_TASK_ID=4", ""),
        (False, True, "SLURM_RESTART_COUNT=1", "SLURM_RESTART_COUNT"),
        (False, False, "SLURM_RESTART_COUNT=1", ""),
        (False, True, "SLURM_HET_SIZE=2 SLURM_JOB_ID_HET_GROUP_0=7", ""),  # its own
        (
            False,
            True,
            "SLURM_HET_SIZE=2 SLURM_JOB_ID_HET_GROUP_0=5 SLURM_NTASKS_HET_GROUP_1=1",
            "SLURM_HET_SIZE SLURM_JOB_ID_HET_GROUP_0 SLURM_NTASKS_HET_GROUP_1",
        ),
    ],
)
def test_variables_of_the_outer_job_are_unset(
    is_array: bool, is_first_start: bool, environ: str, unset: str
) -> None:
    own = {"SLURM_JOB_ID": "7", **assignments(environ)}
    job = Job("7", "RUNNING", is_array=is_array, restarts=int(not is_first_start))
    names = environment.left_over(own, job)
    assert sorted(names) == sorted(unset.split())


def test_without_an_answer_of_slurm_no_count_is_unset() -> None:
    own = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_ARRAY_TASK_ID": "2"}
    assert environment.left_over(own, Job("", "")) == []


def test_clean_environment_keeps_the_variables_of_users_and_sites() -> None:
    kept = {
        "SLURM_CONF": "/etc/x",
        "SBATCH_CONSTRAINT": "a100",
        "SBATCH_MEM_PER_NODE": "0",
        "SBATCH_ACCOUNT": "a",
        "SBATCH_PARTITION": "p",
        "SBATCH_QOS": "q",
        "SBATCH_RESERVATION": "r",
        "SLURM_CLUSTERS": "x",
        "SBATCH_CLUSTERS": "x",
        "SBATCH_MEM_PER_CPU": "1",
        "SBATCH_MEM_PER_GPU": "1",
        "PMIX_MCA_gds": "hash",
        "PATH": "/bin",
        "MY_SLURM_X": "1",
        "MASTER_PORT": "29400",
        "RECIPES_DATA": "/d",
        "RECIPES_CLUSTER": "c",
        "MY_RANK": "1",
        "NCCL_DEBUG": "INFO",
    }
    scrubbed = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPU_BIND": "x",
        "SLURM_NTASKS": "4",
        "SRUN_CPUS_PER_TASK": "1",
        "SBATCH_EXCLUSIVE": "1",
        "SBATCH_GRES": "gpu:8",
        "RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
        "PMIX_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "MASTER_ADDR": "node9",
        "PMI_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
        "NODE_RANK": "1",
        "ROLE_RANK": "1",
        **{
            f"RECIPES_{name}": "1"
            for name in (
                "ATTEMPT",
                "CODE",
                "LISTEN_FD",
                "PYTHON",
                "SPEC",
            )
        },
    }
    assert environment.clean({**kept, **scrubbed}) == kept


def test_an_option_of_the_job_removes_its_variable() -> None:
    environ = {"SBATCH_PARTITION": "p", "SBATCH_ACCOUNT": "a", "SBATCH_MEM_PER_NODE": "1G"}
    job = describe("partition=q", "extra=--mem=0")
    assert environment.clean(environ, job.directives) == {"SBATCH_ACCOUNT": "a"}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"SBATCH_CLUSTERS": "a"}, "a"),
        ({"SBATCH_CLUSTERS": "a", "SLURM_CLUSTERS": "b"}, "b"),
        ({"SBATCH_CLUSTERS": ""}, None),
    ],
)
def test_the_other_commands_use_the_cluster_of_sbatch_unless_they_have_their_own(
    chosen: dict[str, str], expected: str | None
) -> None:
    environment.use_cluster_of_sbatch(chosen)
    assert chosen.get("SLURM_CLUSTERS") == expected


def test_the_tasks_of_a_node_are_added_in_a_step_that_does_not_have_them() -> None:
    for environ, expected in (
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "3"}, "3"),
        ({"SLURM_NTASKS": "4"}, "2"),
        ({}, None),
    ):
        added = environment.with_tasks_per_node(environ, 2)
        assert added.get("SLURM_NTASKS_PER_NODE") == expected


@pytest.mark.parametrize(
    ("tasks", "gpus", "per_node"),
    [("2,1", 2, 1.5), ("8(x2)", 8, 8), ("1(x2)", 8, 8), ("2,1", 0, 0)],
)
def test_gpus_per_node_of_nodes_that_differ(tasks: str, gpus: int, per_node: float) -> None:
    environ = {"SLURM_TASKS_PER_NODE": tasks, "SLURM_GPUS_ON_NODE": str(gpus)}
    assert environment.gpus_per_node(environ) == per_node
