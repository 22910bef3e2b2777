"""Known lines as they stand in public issues and pages (hosts and addresses changed), the first rank to fail, and files that are not logs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.core.doctor import log_events
from recipes.core.doctor.diagnosis import Explanation, RunRecord
from recipes.core.doctor.diagnosis import of_logs as explain
from recipes.core.doctor.signatures import SIGNATURES, Level
from recipes.core.errors import InputError
from tests.helpers import ROOT

BY_NAME = {signature.name: signature for signature in SIGNATURES}

# fmt: off
REAL = {
    "a rank lost its peers": ["rank 3 on node2 lost its peers at step 12: Connection closed by peer [10.0.0.2]:41234"],
    "a rank that hung": ["rank 1 on node1 got no further than step 9 (backward), and the others waited in vain",
                                "mnist: rank 1 on node1 made no progress for 75 s at step 12 (backward): it is ended"],
    "a rank without an error record": ["rank 2 on node2 exited without an error record (killed, out of memory, or its node is gone)"],
    "ranks that did not arrive": [
        "mnist: node1: rank 3 of 4 did not come in time (timeout_s)",
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "torch.distributed.DistStoreError: Timed out after 6 seconds waiting for workers. 1/2 workers joined."],
    "no host name of a client": ["[W104 20:59:35.610101829 socket.cpp:209] [c10d] The hostname of the client socket cannot be retrieved. err=-3"],
    "IPv6 tried first": ["[W304 19:44:40.795037897 socket.cpp:767] [c10d] The client socket cannot be initialized to connect to "
                         "[localhost]:29500 (errno: 97 - Address family not supported by protocol)."],
    "rank 0 was not yet listening": [
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 111 - Connection refused).",
        "node3:941227:943077 [0] NCCL INFO Call to connect returned Connection refused, retrying"],
    "no NCCL plugin": ["node0:13571:13571 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: "
                       "cannot open shared object file: No such file or directory"],
    "process group not destroyed": ["[rank0]:[W322 13:52:48.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not "
                             "called before program exit, which can leak resources."],
    "NCCL finds no interface": ["node1:21:21 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
                                "ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)"],
    "memory cannot be locked": ["node1:9:99 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
                                "ib_log.c:246  UCX  ERROR mlx5_0: ibv_create_cq() failed: Cannot allocate memory. Please set max locked memory"],
    "InfiniBand cannot connect": ["misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error Invalid argument",
                                  "Call to ibv_modify_qp failed with 110 Connection timed out, on dev rocep1s0f1:1"],
    "InfiniBand call failed": ["node1:7:8 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_ah failed with error No such device"],
    "no answer over InfiniBand": [
        "worker-0:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.0.0.9<54862> with status=12 opcode=0 "
        "len=0 vendor err 129 (Recv)",
        "NET/IB : Got completion from peer 10.0.0.2<39138> with error 12, opcode 0, len 0, vendor err 129"],
    "different versions of NCCL": ["RuntimeError: Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22602"],
    "two ranks on one GPU": ["Duplicate GPU detected : rank 0 and rank 4 both on CUDA device 7000"],
    "shared memory is full": [
        "node1:202016:202235 [0] misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: "
        "No space left on device (28)",
        "[3] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers are out "
        "of shared memory. Please try to raise your shared memory limit.",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."],
    "GPUs without peer access": ["node1:97:37 [0] transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : 217 peer access is not "
                                 "supported between these two devices"],
    "no route between nodes": [
        "node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) "
        "errno 115(Operation now in progress)",
        "socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host"],
    "gloo finds no interface": ["RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr. "
                                "Unable to find address for: ib0"],
    "own host name not resolved": ["[rank8] Warning: Unable to resolve hostname to a (local) address. Using the loopback address as fallback."],
    "host name not resolved": ["socket.gaierror: [Errno -2] Name or service not known"],
    "port is taken": [
        "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to "
        "[::]:29500 (errno: 98 - Address already in use).",
        "mnist: node1: port 23456 is in use; set MASTER_PORT to another for all ranks"],
    "GPU call in NCCL failed": ["RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:784, unhandled cuda error, NCCL version 2.7.8"],
    "system call in NCCL failed": ["ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "],
    "invalid use of NCCL": ["torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1287, invalid usage, NCCL version 2.17.1 ncclInvalidUsage: This "
                          "usually reflects invalid usage of NCCL library."],
    "NCCL lost a rank": ["ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
                         "node0:1:2 [0] NCCL WARN socketProgress: Connection closed by remote peer node2<42830>",
                         "node1:183006:183220 [1] misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.0.0.7<58355> failed : Broken pipe"],
    "collective timed out": [
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
        "[rank3]:[E703 15:37:17.178057290 ProcessGroupNCCL.cpp:1922] [PG ID 0 PG GUID 0(default_pg) Rank 3] Observed flight recorder dump "
        "signal from another rank via TCPStore."],
    "ranks in different collectives": ["RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
                                       "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE"],
    "gloo lost a rank": [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.8]:22676",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [10.0.0.9]:25266: Connection reset by peer",
        "RuntimeError: Application timeout caused pair closure"],
    "gloo cannot connect": ["RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"],
    "connection to rank 0 lost": [
        "[rank30]:[W111 00:54:10.905768298 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=99, addr=[::ffff:10.0.0.2]:38760, "
        "remote=[::ffff:10.0.0.1]:42643): Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "DistStoreError: wait timeout after 100ms, keys: /the_key", "torch.distributed.DistStoreError: Socket Timeout"],
    "rank 0 cannot be reached": ["[E728 15:01:59.561275187 socket.cpp:1028] [c10d] The client socket has timed out after 600000ms while trying "
                              "to connect to (127.0.0.1, 48315)."],
    "connection refused": ["node3:941227:943077 [0] include/socket.h:390 NCCL WARN Connect to 10.0.0.2<21724> failed : Connection refused",
                           "node3:18553:18611 [0] include/socket.h:360 WARN Call to connect failed : Connection timed out"],
    "CUDA out of memory": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB",
                           "RuntimeError: CUDA error: out of memory"],
    "memory is full": ["RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: can't allocate memory: you tried to "
                       "allocate 17179869184 bytes. Error code 12 (Cannot allocate memory)",
                       "OSError: [Errno 12] Cannot allocate memory"],
    "assertion on the GPU": ["RuntimeError: CUDA error: device-side assert triggered"],
    "GPU memory error": ["RuntimeError: CUDA error: uncorrectable ECC error encountered"],
    "GPU is lost": ["NVRM: Xid (PCI:0000:06:00): 79, pid=1234, GPU has fallen off the bus."],
    "illegal memory access on the GPU": ["RuntimeError: CUDA error: an illegal memory access was encountered"],
    "GPU not supported by torch": ["RuntimeError: CUDA error: no kernel image is available for execution on the device"],
    "driver is too old": ["RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"],
    "GPU is busy": ["RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
                     "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"],
    "no GPU": ["RuntimeError: No CUDA GPUs are available", "RuntimeError: CUDA error: no CUDA-capable device is detected",
               "mnist: node2: Slurm granted 8 GPUs and torch sees 7: compare nvidia-smi -L there; sbatch --exclude=node2 keeps off that node"],
    "no such GPU number": ["RuntimeError: CUDA error: invalid device ordinal"],
    "time limit": ["slurmstepd: error: *** JOB 13055114 ON node17 CANCELLED AT 2020-07-11T22:48:26 DUE TO TIME LIMIT ***"],
    "preemption": ["slurmstepd: error: *** JOB 636782 ON node805 CANCELLED AT 2026-07-02T16:04:53 DUE TO PREEMPTION ***"],
    "node failure": ["srun: error: Node failure on node37"],
    "job's memory is used up": [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=45791123.batch. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=14604003.0 cgroup. Some of your processes may have been killed by the "
        "cgroup out-of-memory handler.",
        "srun: error: node16: task 0: Out Of Memory", "slurmstepd: error: Exceeded job memory limit",
        "slurmstepd: error: Job 8430179 exceeded memory limit (10442128 > 10240000), being killed"],
    "step was not started": ["srun: error: Task launch for 1443722.0 failed on node node-0-1: Job credential expired",
                             "slurmstepd: error: execve(): python: No such file or directory"],
    "variables of two allocations": [
        "srun: fatal: cpus-per-task set by two different environment variables SLURM_CPUS_PER_TASK=4 != SLURM_TRES_PER_TASK=cpu=2",
        "srun: fatal: gpus-per-task set by two different environment variables SLURM_GPUS_PER_TASK=9 != SLURM_TRES_PER_TASK=cpu=1",
        "srun: fatal: SLURM_TRES_PER_TASK is mutually exclusive with --ntasks-per-gpu and SLURM_NTASKS_PER_GPU"],
    "step exceeds the job": ["srun: error: Unable to create step for job 10: Error generating job credential"],
    "job was refused": ["sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"],
    "crash in native code": ["srun: error: node76: task 0: Segmentation fault (core dumped)", "traceback : Signal 11 (SIGSEGV) received by PID 6421"],
    "killed": ["srun: error: node1: task 5: Killed", "/var/spool/slurmd/job00938/slurm_script: line 15: 24509 Killed memgrab"],
    "ended by the launcher": [
        "srun: error: node34: tasks 2,4-5,7: Terminated", "srun: error: node-10-95: task 0: Exited with exit code 1",
        "W0726 10:59:50.786825 140538811684672 torch/distributed/elastic/multiprocessing/api.py:858] Sending process 147865 closing signal SIGTERM",
        "slurmstepd: error: *** STEP 14366338.0 ON node14 CANCELLED AT 2015-07-03T13:20:09 ***",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "],
    "disk is full": ["OSError: [Errno 28] No space left on device"],
    "quota is used up": ["OSError: [Errno 122] Disk quota exceeded"],
    "stale file handle": ["OSError: [Errno 116] Stale file handle"],
    "file server is lost": ["OSError: [Errno 107] Transport endpoint is not connected: '/data'"],
    "disk cannot be read": ["OSError: [Errno 5] Input/output error"],
    "disk is read-only": ["OSError: [Errno 30] Read-only file system: '/data/out'"],
    "too many open files": ["OSError: [Errno 24] Too many open files", "RuntimeError: received 0 items of ancdata"],
    "permission denied": ["PermissionError: [Errno 13] Permission denied: '/scratch/data'"],
    "loader process ended": ["RuntimeError: DataLoader worker (pid(s) 3216) exited unexpectedly"],
    "module is missing": ["ModuleNotFoundError: No module named 'torchvision'"],
    "C or C++ library is too old": ["ImportError: /lib64/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by x.so)"],
    "incompatible libraries": ["ImportError: undefined symbol: cutlass_moe_mm_sm100"],
    "library is missing": ["ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"],
    "file is missing": ["FileNotFoundError: [Errno 2] No such file or directory: '/data/train'"],
    "checkpoint does not fit": ["RuntimeError: Error(s) in loading state_dict for ResNet:",
                                "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"],
    "loss is not finite": ["RuntimeError: the loss at step 12 is nan: a lower lr, or the data, is where to look",
                           "{'loss': nan, 'grad_norm': nan, 'learning_rate': 2e-05, 'epoch': 0.01}"],
    "parameters without gradient": ["RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."],
}
# fmt: on


def said(tmp_path: Path, **files: str) -> Explanation:
    """What is found in a folder with these files; ``__`` in a name stands for a dot."""
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    return explain(tmp_path)


def names(found: Explanation) -> list[str]:
    return [cause.signature.name for cause in found.causes]


# --- the table


def test_each_signature_is_shown_on_a_line_and_says_what_to_do() -> None:
    assert set(REAL) == set(BY_NAME)
    assert len(SIGNATURES) == len(BY_NAME) >= 25
    for signature in SIGNATURES:
        for text in (signature.name, signature.means, signature.fix):
            assert 0 < len(text) < 160
            assert "\n" not in text
        assert all(part for wording in signature.pattern.split(" | ") for part in wording.split("…")), signature.pattern


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in REAL.items() for line in lines])
def test_a_real_log_line_has_its_signature(tmp_path: Path, name: str, line: str) -> None:
    found = said(tmp_path, job__out=f"epoch 1  step 1  loss 2.3008\n{line}\nbye\n")
    assert names(found) == [name]
    assert found.causes[0].where == "job.out:2"
    assert found.causes[0].line.startswith(line[:60].strip())
    text = "\n".join(found.lines())
    assert BY_NAME[name].level is Level.harmless or BY_NAME[name].fix in text
    assert len(found.lines()) <= 20


@pytest.mark.parametrize(
    "wording",
    ["lost its peers", "got no further than", "made no progress with", "made no progress for", "exited without an error record",
     "did not come in time (timeout_s)", "is in use; set MASTER_PORT", "cannot reach rank 0 at", ": a lower lr", "and torch sees"],
)  # fmt: skip
def test_wordings_of_this_project_are_printed_by_it(wording: str) -> None:
    """These lines are in the logs of these recipes: whoever changes such a message changes the table."""
    assert any(wording in signature.pattern for signature in SIGNATURES)
    files = [path for path in (ROOT / "recipes").rglob("*.py") if path.name != "signatures.py"]
    assert any(wording in path.read_text() for path in files)


@pytest.mark.parametrize("wording", sorted({w for s in SIGNATURES for w in s.pattern.split(" | ")}))
def test_no_wording_is_hidden_by_one_above_it(tmp_path: Path, wording: str) -> None:
    owner = next(s for s in SIGNATURES if wording in s.pattern.split(" | "))
    found = said(tmp_path, a__log=wording.replace("…", " 1 ") + "\n")
    assert found.causes[0].signature.level <= owner.level, names(found)


ORDINARY = """\
mnist: 4 ranks on 2 nodes, cpu, gloo
run directory: /home/me/runs/mnist/1
network: eth0 (route to node2 (10.250.103.12))
epoch 1  step 1  loss 2.3008  lr 0.00065  2,352 samples/s
epoch 10  step 230  loss 0.5416  lr 1.6e-07  1,831 samples/s  val_top1 0.9944  val_top5 1.0000
checkpoint /home/me/runs/demo/checkpoints/step-00000230.pt
test accuracy 99.44% on 359 digits; run directory runs/demo
mnist: done; run directory /home/me/runs/mnist/1
node0:13571:13571 [0] NCCL INFO Bootstrap : Using enp10s0:10.10.7.107<0>
node0:13571:13571 [0] NCCL INFO NET/IB : No device found.
node0:13571:13900 [0] NCCL INFO comm 0x7f132405ad20 rank 0 nranks 8 cudaDev 0 busId 100000 - Init COMPLETE
Epoch: [0][ 10/5005]	Time  0.336 ( 1.012)	Data  0.000 ( 0.461)	Loss 7.0311e+00 (7.0732e+00)	Acc@1   0.00 (  0.21)
2024-04-10 04:59:03 | INFO | logs | Total loss at epoch 5, step at 58400, loss=31.05100440979004
{'loss': 1.2031, 'grad_norm': 0.61, 'learning_rate': 1.9e-05, 'epoch': 0.02}
 45%|####5     | 2321/5005 [12:33<14:12,  3.15it/s, loss=2.61]
srun: job 14774 queued and waiting for resources
srun: job 14774 has been allocated resources
"""


def test_ordinary_logs_have_no_cause(tmp_path: Path) -> None:
    found = said(tmp_path, job__out=ORDINARY)
    assert (found.causes, found.rank, found.host) == ((), None, None)
    assert found.lines() == [
        "no known cause in 1 file; the last line, in job.out: srun: job 14774 has been allocated resources"
    ]


def test_the_logs_in_the_documentation_have_no_cause(tmp_path: Path) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in page.read_text().split("```")[1::2]]
    assert len(blocks) > 40
    assert said(tmp_path, readme__txt="\n".join(blocks)).causes == ()


# --- who was first


WATCHDOG = (
    "[rank{0}]:[E321 02:07:{1:02d}.4 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={2}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600060 milliseconds\n"
)


def test_a_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    found = said(
        tmp_path,
        rank0__log="[rank0]: RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.8]:22676\n",
        rank1__log=WATCHDOG.format(1, 9, 5),
        rank2__log="step 4\nnode7:11:12 [0] NCCL INFO x\nrank 2 on node7: saves\ntorch.OutOfMemoryError: CUDA out of memory.\n",
    )
    assert (found.rank, found.where) == (2, "rank2.log:4")
    assert names(found) == ["CUDA out of memory", "gloo lost a rank", "collective timed out"]
    assert found.lines() == [
        "rank 2 failed first: CUDA out of memory",
        "  rank2.log:4: torch.OutOfMemoryError: CUDA out of memory.",
        f"cause: CUDA out of memory (1 rank): {BY_NAME['CUDA out of memory'].means}",
        f"  do: {BY_NAME['CUDA out of memory'].fix}",
        "followed: gloo lost a rank (1 rank), collective timed out (1 rank)",
    ]


def test_a_second_exception_far_below_the_first_is_noted(tmp_path: Path) -> None:
    caught = "Traceback (most recent call last):\n  x\nKeyError: 'a'\n"
    fatal = "Traceback (most recent call last):\n  x\nValueError: b\n"
    steps = "".join(f"step {i}  loss 0.5\n" for i in range(900))
    found = said(tmp_path, rank3__log=caught + steps + fatal)
    assert found.lines()[-1] == "rank3.log has another exception 903 lines below: ValueError: b"
    assert said(tmp_path, rank3__log=caught + fatal).notes == ()  # one comes of the other


def test_a_loggers_warning_is_not_the_cause_if_there_is_another(tmp_path: Path) -> None:
    line = "2026-11-22 10:00:00,123 {} cache: /x: Permission denied\n"
    fatal = "2026-11-22 10:09:00,123 [rank5]: torch.OutOfMemoryError: CUDA out of memory.\n"
    found = said(tmp_path, rank0__log=line.format("WARNING"), rank5__log=fatal)
    assert (found.rank, names(found)) == (5, ["CUDA out of memory", "permission denied"])
    found = said(tmp_path, rank0__log=line.format("WARNING") + line.format("ERROR"), rank5__log=fatal)
    assert (found.rank, found.where) == (0, "rank0.log:2")
    of_values = "NCCL_DEBUG=INFO /x/DEBUG/y: Permission denied\n"  # no logger's word
    assert said(tmp_path, rank0__log=of_values, rank5__log="torch.OutOfMemoryError: CUDA out of memory.\n").rank == 0
    found = said(tmp_path, rank0__log=line.format("WARNING"), rank5__log="step 1\n")
    assert (found.rank, names(found)) == (0, ["permission denied"])


def test_a_signal_name_in_arguments_is_no_event(tmp_path: Path) -> None:
    found = said(tmp_path, rank0__log="--signals-to-handle=SIGTERM,SIGINT\nlast word\n")
    assert found.verdict == "no known cause in 1 file; the last line, in rank0.log: last word"
    for words in (
        "Signal 15 (SIGTERM) received by PID 7", "Received SIGTERM", "closing signal SIGTERM", "Bypassing SIGTERM: 15",
        "subprocess.CalledProcessError: Command 'x' died with <Signals.SIGTERM: 15>.", "Received signal: SIGTERM",
    ):  # fmt: skip
        assert names(said(tmp_path, rank0__log=f"{words}\n")) == ["ended by the launcher"]


def test_srun_names_the_host_and_the_first_of_those_that_ended(tmp_path: Path) -> None:
    text = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: node2: task 5: Out Of Memory\n"
        "srun: Terminating StepId=7.0\n"
        "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-01-02T03:04:05 ***\n"
        "srun: error: node1: tasks 0-3: Killed\n"
        "srun: error: node2: task 4: Killed\n"
    )
    found = said(tmp_path, slurm_7__out=text)
    assert (found.rank, found.host) == (5, "node2")
    assert found.lines()[0] == "rank 5 on node2 failed first: job's memory is used up"
    assert found.lines()[-2:] == ["also: killed (2 ranks)", "followed: ended by the launcher (1 file)"]


def test_of_two_causes_the_one_of_the_lower_rank_is_first_in_numerical_order(tmp_path: Path) -> None:
    line = "OSError: [Errno 5] Input/output error\n"
    found = said(tmp_path, rank10__log=line, rank9__log=line, rank11__log=line)
    assert (found.rank, found.causes[0].count, found.causes[0].of) == (9, 3, "rank")


def test_a_consequence_alone_is_reported_as_one(tmp_path: Path) -> None:
    found = said(tmp_path, a__log="".join(WATCHDOG.format(n, 8 + n, 7) for n in range(3)))
    assert (found.rank, found.causes[0].signature.level) == (0, Level.consequence)
    assert "the logs do not show its cause" in found.verdict


def test_the_rank_with_the_lowest_collective_was_behind(tmp_path: Path) -> None:
    text = "".join(WATCHDOG.format(rank, rank, 64088 if rank == 7 else 96120) for rank in (0, 1, 7, 2, 3))
    found = said(tmp_path, a__log=text)
    assert found.verdict == "rank 7 was behind: it waited in collective 64088, the others in 96120"
    assert found.rank == 7


def test_the_only_silent_rank_is_named(tmp_path: Path) -> None:
    lost = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.8]:22676\n"
    logs = {f"rank{rank}__log": "step 1\n" if rank == 2 else lost for rank in range(4)}
    found = said(tmp_path, **logs)
    assert (found.rank, found.verdict[:19]) == (2, "rank 2 reported not")


def test_a_time_limit_blames_no_rank(tmp_path: Path) -> None:
    text = (
        "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***\n"
        "srun: error: node1: tasks 0-3: Terminated\n"
    )
    found = said(tmp_path, slurm_7__out=text)
    assert (found.rank, found.host) == (None, None)
    assert found.verdict == "the whole job was ended, and no rank is to blame: time limit"


def test_a_rank_that_failed_before_the_time_limit_is_named(tmp_path: Path) -> None:
    limit = "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***\n"
    found = said(tmp_path, job__out=limit, rank2__log="OSError: [Errno 28] No space left on device\n")
    assert (found.rank, names(found)) == (2, ["disk is full", "time limit"])
    found = said(tmp_path, rank2__log="Traceback (most recent call last):\n  File\nmine.Stopped: by SIGUSR2\n")
    assert (found.rank, names(found)) == (None, ["time limit", "the program's own error"])


def test_an_unknown_exception_is_named_by_its_last_line_and_its_rank(tmp_path: Path) -> None:
    text = (
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "train.py", line 3, in <module>\n'
        "[rank0]: ncclRemoteError: A call failed possibly due to a network error\n"
        "[rank1]:     x = cells[7]\n"
        "[rank1]: KeyError: 7\n"
    )
    found = said(tmp_path, job__err=text)
    assert (found.rank, found.error, found.where) == (1, "[rank1]: KeyError: 7", "job.err:5")
    assert found.verdict == "rank 1 failed first: the program's own error"


def test_a_known_exception_is_reported_once(tmp_path: Path) -> None:
    text = "Traceback (most recent call last):\n  File \"t.py\", line 3, in <module>\nModuleNotFoundError: No module named 'x'\n"
    assert names(said(tmp_path, job__err=text)) == ["module is missing"]


def test_nccl_gives_a_warnings_rank_and_host(tmp_path: Path) -> None:
    text = (
        "node5:240:300 [6] NCCL INFO comm 0x7f132405ad20 rank 14 nranks 16 cudaDev 6 busId 97000 - Init START\n"
        "node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<5> returned 113(No route to host)\n"
    )
    found = said(tmp_path, job__out=text)
    assert (found.rank, found.host) == (14, "node5")


def test_labels_of_srun_are_ranks_where_all_lines_have_them(tmp_path: Path) -> None:
    text = "".join(f" {rank}: epoch 1\n" for rank in range(12)) + "11: OSError: [Errno 5] Input/output error\n"
    assert said(tmp_path, job__out=text).rank == 11
    assert said(tmp_path, job__out="epoch 1\nepoch 2\nepoch 3\n" + text).rank is None


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("logs/rank3.log", 3), ("17_5_log.err", 5), ("17_2_5_log.out", 5), ("slurm-17.out", None), ("job_17_task_4.err", 4),
        ("run/attempt_0/6/stderr.log", 6), ("ranking7.log", None), ("train.o17", None),
    ],
)  # fmt: skip
def test_the_rank_is_read_from_the_file_name(tmp_path: Path, name: str, rank: int | None) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("OSError: [Errno 5] Input/output error\n")
    found = explain(tmp_path)
    assert (found.rank, found.where) == (rank, f"{name}:1")


def test_folders_of_two_torchruns_name_no_rank(tmp_path: Path) -> None:
    for node in "ab":
        (tmp_path / node / "attempt_0" / "1").mkdir(parents=True)
        (tmp_path / node / "attempt_0" / "1" / "stderr.log").write_text("OSError: [Errno 5] Input/output error\n")
    assert explain(tmp_path).rank is None


def test_what_is_only_harmless_is_no_failure(tmp_path: Path) -> None:
    found = said(tmp_path, job__out=REAL["no host name of a client"][0] + "\nlast words\n")
    assert (found.rank, found.verdict) == (None, "no known cause in 1 file; the last line, in job.out: last words")
    assert found.lines()[-1] == "harmless: no host name of a client (1 file)"


def test_a_progress_bar_does_not_hide_the_text_after_it(tmp_path: Path) -> None:
    bar = "".join(f"\r{n}%|####    | {n}/100" for n in range(100))
    found = said(tmp_path, job__out=f"a\n{bar}{WATCHDOG.format(3, 1, 2)}")
    assert (found.rank, found.causes[0].where) == (3, "job.out:2")


# --- our own last lines


def test_a_real_run_of_which_a_rank_was_killed(tmp_path: Path) -> None:
    """The lines of `make faults`' simplest case, as the launcher printed them."""
    text = (
        "epoch 35  step 8160  loss 2.3043  lr 0.0039  2,251 samples/s\n"
        "rank 0 on node1 lost its peers at step 8160: Read error [127.0.0.1]:61143: Connection reset by peer\n"
        "mnist: failed: rank 1 on node1 exited without an error record (killed, out of memory, or its node is gone); logs in /r/logs\n"
        "failed: rank 1 on node1 was killed by SIGKILL; logs in /r/logs\n"
    )
    found = said(tmp_path, job__out=text)
    assert (found.rank, found.host, found.verdict) == (1, "node1", "rank 1 on node1 was killed by SIGKILL")
    assert names(found) == ["a rank without an error record", "killed", "a rank lost its peers"]


def test_a_jobs_own_file_names_the_rank_in_its_last_line(tmp_path: Path) -> None:
    text = (
        "mnist: 4 ranks on 2 nodes, cpu, gloo\nrun directory: /r\nOSError: [Errno 28] No space left on device\n"
        "mnist: 4 ranks on 2 nodes, cpu, gloo, attempt 2\nrun directory: /r\n"
        "rank 0 on node1 lost its peers at step 5: Connection closed by peer\n"
        "mnist: failed: rank 3 on node2 got no further than step 5 (data), and the others waited in vain; logs in /r/logs\n"
    )
    (tmp_path / "mnist-7.out").write_text(text)
    found = explain(tmp_path / "mnist-7.out")
    assert (found.rank, found.host) == (3, "node2")
    assert found.verdict.startswith("rank 3 on node2 got no further than step 5 (data)")
    assert names(found) == ["a rank that hung", "a rank lost its peers"], "of an earlier attempt"


def test_another_programs_run_directory_line_hides_nothing(tmp_path: Path) -> None:
    assert names(said(tmp_path, a__log="CUDA out of memory\nrun directory: /x\n")) == ["CUDA out of memory"]


# --- what is no log


@pytest.mark.parametrize(
    "make", [lambda p: None, lambda p: p.mkdir(), lambda p: os.mkfifo(p), lambda p: p.symlink_to(p)]
)
def test_a_path_without_logs_is_one_line(tmp_path: Path, make: object) -> None:
    make(tmp_path / "x\x1b[31m\n")  # type: ignore[operator]
    with pytest.raises(InputError) as error:
        explain(tmp_path / "x\x1b[31m\n")
    assert str(error.value).isprintable()


def test_a_device_is_not_read() -> None:
    with pytest.raises(InputError, match="not a regular file"):
        explain(Path("/dev/zero"))
    with pytest.raises(InputError):
        explain(Path("a\0b"))


def test_empty_logs_are_reported_as_empty(tmp_path: Path) -> None:
    assert said(tmp_path, a__log="", b__log="\n\n").lines() == ["no known cause in 2 files: they are empty"]


def test_pipes_circular_links_and_unreadable_files_are_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "round.log").symlink_to("round.log")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "zero.log").symlink_to("/dev/zero")
    (tmp_path / "closed.log").write_text("secret")
    (tmp_path / "closed.log").chmod(0)
    found = said(tmp_path, a__log="OSError: [Errno 28] No space left on device\n")
    assert names(found) == ["disk is full"]
    assert found.causes[0].count == 1
    left = 4 if os.getuid() else 3
    assert f"and {left - 1} more" in found.notes[0]


def test_binary_content_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(
        bytes(range(256)) * 4000 + b"\nCUDA out of memory \xff\xfe\x00\x1b]0;title\x07 \xe2\x80\xae end\n"
    )
    found = explain(tmp_path)
    assert names(found) == ["CUDA out of memory"]
    for line in found.lines():
        assert line.isprintable()
    assert "\\x1b]0;title\\x07" in found.causes[0].line
    assert "\\u202e" in found.causes[0].line


def test_names_of_files_and_hosts_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J\n.log").write_text("CUDA out of memory\n")
    own = RunRecord("rank 1 on \x1b[2Jx failed first: \r\nx", 1, "\x1b[2Jx")
    assert all(line.isprintable() for line in explain(tmp_path, own).lines())


def test_colours_do_not_hide_a_cause(tmp_path: Path) -> None:
    found = said(tmp_path, a__log="\x1b[31mCUDA \x1b[1mout of\x1b[0m memory\n")
    assert found.causes[0].line == "CUDA out of memory"


@pytest.mark.parametrize(
    "content",
    [
        "a",
        "(",
        "Killed",
        "srun: error:",
        "[rank1",
        "\n",
        "\r",
        "\x1b[",
        "Traceback (most recent call last)\n",
        "CUDA out of memory\n",
        "2024-01-01 00:00:00 ",
    ],
)
def test_ten_megabytes_of_anything_take_little_time(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.log").write_text(content * (10_000_000 // len(content)))
    begun = time.process_time()
    explain(tmp_path)
    assert time.process_time() - begun < 10, "it grows faster than the file"


def test_of_a_large_file_both_ends_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_events, "HEAD_BYTES", 1000)
    monkeypatch.setattr(log_events, "TAIL_BYTES", 2000)
    filler = "step\n" * 1000
    text = "Stale file handle\n" + filler + "Disk quota exceeded\n" + filler + "Read-only file system\nend\n"
    found = said(tmp_path, a__log=text)
    assert [(c.signature.name, c.where) for c in found.causes] == [
        ("stale file handle", "a.log:1"),
        ("disk is read-only", "a.log, line 2 from its end"),
    ]


@pytest.mark.parametrize("name", ["{}_0_log.out", "mnist-{}.out", "slurm-{}_1.err"])
def test_of_several_jobs_the_newest_is_explained(tmp_path: Path, name: str) -> None:
    for at, job in enumerate((12, 9, 10)):
        path = tmp_path / name.format(job)
        path.write_text("Stale file handle\n" if job == 10 else "CUDA out of memory\n")
        os.utime(path, (at, at))
    found = explain(tmp_path)
    assert names(found) == ["stale file handle"]
    assert found.lines()[-1].startswith("read: the logs of job 10")


def test_the_number_of_files_read_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_events, "MOST_FILES", 5)
    found = said(tmp_path, **{f"rank{n}__log": "Stale file handle\n" for n in range(9)})
    assert found.causes[0].count == 5
    assert "more than 5 logs" in found.lines()[-1]
    monkeypatch.setattr(log_events, "MOST_NAMES", 3)
    assert "or 3 files; not all were read" in explain(tmp_path).lines()[-1]


def test_an_explanation_has_at_most_twenty_lines(tmp_path: Path) -> None:
    everything = "\n".join(line for lines in REAL.values() for line in lines)
    found = said(tmp_path, **{f"rank{n}__log": everything for n in range(3)})
    assert len(found.lines()) <= 20
    assert all(len(line) <= log_events.LONGEST_LINE for line in found.lines())
    assert found.lines()[-1].startswith("harmless: ")


def test_a_run_of_another_launcher_is_explained(tmp_path: Path) -> None:
    """A process that really fails, with Python's own traceback."""
    with open(tmp_path / "4_1_log.err", "w") as file:
        subprocess.run([sys.executable, "-c", "import json; json.loads('{')"], stderr=file, check=False, timeout=60)
    found = explain(tmp_path)
    assert (found.rank, found.verdict) == (1, "rank 1 failed first: the program's own error")
    assert found.error.startswith(json.JSONDecodeError.__module__)
