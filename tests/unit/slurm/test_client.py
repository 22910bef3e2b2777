"""What Slurm says about jobs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from recipes.core.errors import MachineError, Next
from recipes.core.slurm import client, jobstate
from tests import helpers
from tests.unit.launch.stand_ins import Stubs

# Printed by Slurm 22.05, shortened; the name and the paths hold what a user may type.
PRINTED = """\
JobId=12 ArrayJobId=11 ArrayTaskId=0 ArrayTaskThrottle=2 JobName=a b JobState=DONE
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4 Account=(null) QOS=N/A
   JobState=CANCELLED Reason=BeginTime Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:9
   RunTime=00:01:30 TimeLimit=02:00:00
   SubmitTime=2026-11-23T13:00:10 EligibleTime=2026-11-23T13:00:50
   StartTime=2026-11-23T13:49:29 EndTime=2026-11-23T13:50:59 PreemptTime=2026-11-23T13:50:00
   Partition=gpu AllocNode:Sid=login:9
   ReqNodeList=node1 ExcNodeList=node7
   NodeList=node[1-2]
   NumNodes=2 NumCPUs=48 NumTasks=6 CPUs/Task=8 ReqB:S:C:T=0:0:*:*
   NtasksPerN:B:S:C=3:0:*:* CoreSpec=*
   Features=a100 Reservation=(null)
   Command=/home/me/my-jobs/x=1.sh epochs=3
   TresPerNode=gres/gpu:a100:4
   StdErr=
   StdOut=/home/me/my jobs/log
   Comment=Restarts=7 x
   SystemComment=see JobState=RUNNING

JobId=13 JobName=b
   Priority=0
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=0 Reboot=0 ExitCode=3:0
   StartTime=Unknown PreemptTime=None
   NumNodes=2 NumTasks=6 NtasksPerN:B:S:C=0:0:*:*
"""


def test_each_job_that_scontrol_prints_is_parsed() -> None:
    task, plain = jobstate.parse(PRINTED)
    assert task.id == "11_0"
    assert task.state == "CANCELLED"
    assert task.reason == "BeginTime"
    assert task.restarts == 2
    assert task.ended is True
    assert task.exit_status == 137
    assert task.number == "12"
    assert task.is_array
    assert task.log == "/home/me/my jobs/log"
    assert task.error_log == ""
    assert task.left_s == 7110
    assert task.start == "2026-11-23T13:49:29"
    assert task.submitted == jobstate.moment("2026-11-23T13:00:10")
    assert jobstate.describe(task) == "job 11_0 is cancelled (BeginTime)"
    assert (task.has_script, task.is_preempted, task.has_no_priority) == (True, True, False)
    assert task.options == {
        "nodes": "2",
        "ntasks-per-node": "3",
        "gpus-per-node": "a100:4",
        "cpus-per-task": "8",
        "time": "02:00:00",
        "partition": "gpu",
        "constraint": "a100",
        "exclude": "node7",
    }
    assert plain.id == "13"
    assert not plain.is_array
    assert plain.state == "RUNNING"
    assert plain.reason == ""
    assert plain.ended is False
    assert plain.exit_status == 3
    assert (plain.start, plain.submitted, plain.left_s) == ("", None, None)
    assert (plain.has_script, plain.is_preempted, plain.has_no_priority) == (False, False, True)
    assert plain.options == {"nodes": "2", "ntasks": "6"}


def test_what_slurm_does_after_a_start_follows_from_the_state() -> None:
    def after(states: str) -> set[object]:
        return {jobstate.Job("7", state, "", 0, 0).after_start(0) for state in states.split()}

    assert after(
        "BOOT_FAIL COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT"
    ) == {Next.not_requeued}
    assert after("PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT") == {Next.requeued}
    assert after("RUNNING SUSPENDED CONFIGURING REVOKED") == {None}
    over_time = jobstate.Job("7", "COMPLETING", limit_s=60.0, run_s=60.0)
    assert over_time.after_start(0) is Next.not_requeued


def test_a_job_is_found_by_its_whole_comment_and_the_cluster_by_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {
        "squeue": "5\n\n6 abcd\n7 abc\n",
        "scontrol": "MyClusterName=x\nClusterName             = here\n",
    }
    monkeypatch.setattr(client, "_answer", lambda *command: said[command[0]])
    assert client.find_by_comment("abc") == "7"
    assert client.find_by_comment("ab") == ""
    assert client.cluster_name() == "here"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", None),
        (
            "echo Job 7 not found; exit 1",
            None,
        ),  # printed for 7_1 while other elements of array 7 are known
        (
            "echo Unable to contact slurm controller >&2; exit 1",
            "does not answer: Unable to contact",
        ),
        ("exec /bin/sleep 60", r"^Slurm's controller has not answered within 0\.5 s$"),
        ("", "not on the PATH"),
    ],
)
def test_an_unknown_job_is_none_and_an_unavailable_controller_is_an_error(
    stubs: Stubs, script: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        stubs.add("scontrol", script)
    monkeypatch.setenv("PATH", f"{stubs.folder}/stubs")
    if expected is None:
        assert client.find("7") is None
        assert len(stubs.calls("scontrol")) == 1
    else:
        with pytest.raises(MachineError, match=expected):
            client.show("7", timeout_s=0.5 if "sleep" in script else client.ANSWER_S)


def test_the_own_job_of_an_array_is_the_one_with_its_number(stubs: Stubs) -> None:
    """The element that was submitted first has the number of the array."""
    stubs.add("scontrol", "printf 'JobId=101 ArrayJobId=100 ArrayTaskId=0\\n\\nJobId=100\\n'")
    assert client.own({"SLURM_JOB_ID": "100"}).number == "100"


@pytest.mark.parametrize(
    ("reason", "means"),
    [
        ("PartitionTimeLimit", "never starts"),
        ("ReqNodeNotAvail, UnavailableNodes:node[1-2]", "down or reserved"),
        ("JobLaunchFailure", "the folder of its log"),
        ("QOSMaxGRESPerUser", "when other jobs have ended"),
        ("AssocGrpCpuLimit", "when other jobs have ended"),
        ("launch failed requeued held", "scontrol release"),
        ("launch_failed_requeued_held", "scontrol release"),
        ("Resources", ""),
        ("NotPartitionTimeLimit", ""),
    ],
)
def test_a_pending_reason_is_explained(reason: str, means: str) -> None:
    line = jobstate.describe(jobstate.Job("7", "PENDING", reason, 0, 0))
    assert line.startswith(f"job 7 is pending ({reason}{': ' if means else ')'}")
    assert means in line


def test_a_job_name_that_is_not_utf8_is_parsed(stubs: Stubs) -> None:
    stubs.add("scontrol", r"printf 'JobId=7 JobName=\xe9t\xe9\n JobState=RUNNING\n'")
    assert [job.state for job in client.show("7")] == ["RUNNING"]


def test_the_time_left_is_the_controllers_else_that_of_the_jobs_environment(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_JOB_END_TIME", f"{time.time() + 1000:.0f}")):
        monkeypatch.setenv(name, value)
    for told, left_s in (("TimeLimit=00:03:00 RunTime=00:01:00", 120), ("TimeLimit=NOT_SET", 1000)):
        stubs.add("scontrol", f"echo JobId=7 {told}")
        assert client.seconds_left(os.environ) == pytest.approx(left_s, abs=5)
    monkeypatch.setenv("PATH", "/nosuch")
    assert client.seconds_left(os.environ) == pytest.approx(1000, abs=5)
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    limits: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(client, "find", lambda job, limit_s=60.0: limits.append(limit_s))
        assert client.seconds_left(os.environ) is None
    assert limits == [10.0]  # there may be little time left
    monkeypatch.delenv("SLURM_JOB_ID")
    assert client.seconds_left(os.environ) is None


@pytest.mark.parametrize(
    "name",
    [
        "SQUEUE_PARTITION",
        "SQUEUE_STATES",
        "SINFO_PARTITION",
        "SCONTROL_ALL",
        "SCANCEL_NAME",
        "SLURM_TIME_FORMAT",
    ],
)
def test_a_users_defaults_for_slurms_commands_have_no_effect(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "x")
    for command in ("squeue", "sinfo", "scontrol", "scancel"):
        stubs.add(
            command, f"[ -z \"${{{name}:-}}\" ] || exit 1; echo '7|RUNNING|N/A|node1|1:00|1|None'"
        )
    assert client.mine() is not None
    # else the elements of an array that wait are one line, and jobs that have ended are missing
    assert {"--me", "--array", "--states=all"} <= set(stubs.calls("squeue")[0])
    assert client.nodes()
    client.cancel("7")


def test_a_heterogeneous_job_is_in_the_queue_by_its_id(stubs: Stubs) -> None:
    stubs.add("squeue", 'for i in 0 1; do echo "7+$i|RUNNING|N/A|node$i|1:00|1|None"; done')
    jobs = client.mine()
    assert [(job_id, line.nodes) for job_id, line in jobs.items()] == [
        ("7", "node0"),
        ("7+1", "node1"),
    ]


def test_a_call_that_fails_twice_is_repeated(stubs: Stubs) -> None:
    """A busy controller does not always answer."""
    stubs.add(
        "scontrol",
        "[ $(wc -l < $NOTES/scontrol.calls) -gt 2 ] || exit 1; echo JobId=7 JobState=RUNNING",
    )
    assert client.find("7").state == "RUNNING"
    (stubs.folder / "scontrol.calls").unlink()
    client.exclude("7", "node1")
    assert len(stubs.calls("scontrol")) == 3


def test_a_requeue_whose_answer_is_lost_counts_as_done(stubs: Stubs) -> None:
    for state in ("RUNNING Restarts=3", "PENDING Priority=0", "PENDING Priority=4"):
        stubs.add("scontrol", f"[ $1 = show ] || exit 1; echo JobId=7 JobState={state}")
        client.requeue({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"})
    stubs.add("scontrol", "[ $1 = show ] || exit 1; echo JobId=7 JobState=RUNNING Restarts=2")
    with pytest.raises(subprocess.CalledProcessError):
        client.requeue({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"})


def test_the_steps_of_a_job_are_ended_without_its_batch_script(stubs: Stubs) -> None:
    stubs.add("squeue", "printf '%s\\n' 7.batch 7.extern 7.0 7.12 7.interactive")
    stubs.add("scancel", "")
    client.kill_steps("7")
    [call] = helpers.wait_until(lambda: stubs.calls("scancel"), 10, "the call")
    assert call == ["--signal=KILL", "7.0", "7.12"]


def test_the_limits_are_those_of_the_named_or_the_default_partition(stubs: Stubs) -> None:
    small = r"PartitionName=cpu\n   Default=NO MaxNodes=4 MaxTime=01:00:00\n"
    large = r"PartitionName=gpu\n   Default=YES MaxNodes=UNLIMITED MaxTime=2-00:00:00\n"
    stubs.add("scontrol", rf"printf '{small}\n{large}'")
    assert client.partition("") == client.Partition("gpu", "2-00:00:00", None)
    assert client.partition("cpu") == client.Partition("cpu", "01:00:00", 4)
    assert stubs.calls("scontrol") == [["show", "partition"], ["show", "partition", "cpu"]]


def test_the_id_of_a_job_on_another_cluster_is_without_its_name(stubs: Stubs) -> None:
    stubs.add("sbatch", 'echo "$RECIPES_CLUSTER" > $NOTES/cluster; echo "12;there"')
    variables = {"RECIPES_CLUSTER": "site"}
    with open(__file__) as script:
        number = script.fileno()
        job_id = client.submit_open_file(number, ["lr=1"], ["--nodes=2"], variables, "/")
        path = f"/proc/self/fd/{script.fileno()}"
    assert job_id == "12"
    assert (stubs.folder / "cluster").read_text() == "site\n"
    assert stubs.calls("sbatch") == [["--parsable", "--nodes=2", path, "lr=1"]]


def test_nodes_on_which_no_task_starts_are_silent(stubs: Stubs) -> None:
    stubs.add("srun", "[[ $* == *--nodes=1*--nodelist=node[13]* ]]")
    assert client.silent_nodes(["node1", "node2", "node3"]) == {"node2"}
    assert client.silent_nodes(["node1"]) == client.silent_nodes([]) == set()


def test_no_node_is_silent_because_of_the_controller(stubs: Stubs) -> None:
    stubs.add("srun", "exit 1")
    for nodes in (["node1", "node2"], ["node1"]):
        assert client.silent_nodes(nodes) == set()


def test_a_slow_controller_does_not_keep_a_user_waiting(
    stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    stubs.add("squeue", "exec sleep 60")
    assert client.mine(timeout_s=1.0) is None
    assert "Slurm has not answered within 1 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("NumTasks=10 TresPerTask=gres:gpu:1", True),
        ("NumTasks=4 TresPerTask=cpu=2,gres/gpu:a100=1", True),
        ("NumTasks=5 TresPerTask=cpu=2 NtasksPerTRES=2", True),
        ("NumTasks=4 TresPerTask=cpu=2 NtasksPerTRES=0 TresPerNode=gres/gpu:2", False),
        ("", False),
    ],
)
def test_a_job_has_gpus_per_task_or_tasks_per_gpu(fields: str, expected: bool) -> None:
    (job,) = jobstate.parse(f"JobId=7 {fields}")
    assert job.gpus_per_task == expected


def test_the_limit_of_a_call_counts_all_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    limits: list[float] = []

    def fail(command: Sequence[str], *, timeout: float, **_: object) -> object:
        limits.append(timeout)
        clock.now += 2.0
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    client._call("scontrol", timeout_s=4.0)
    assert limits == [4.0, 2.0, 1.0]
