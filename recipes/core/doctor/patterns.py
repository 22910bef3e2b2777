"""Known lines of torch, NCCL, CUDA, Slurm, the kernel and Python: what each means, and what to do about it.

The texts are plain, without regular expressions: looking for all of them takes time in proportion to the size of the logs. No text
may match a line that this project prints itself.
"""

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """What a line says about the failure; lower levels are closer to its cause."""

    cause = 0
    whole_job = 1  # no single rank is to blame. A job that hangs after a rank's failure ends at its time limit, too
    hint = 2  # something is wrong, and the line does not say what
    consequence = 3  # another rank is gone


@dataclass(frozen=True)
class Pattern:
    """texts: alternatives, separated by " | ". seen: a real line, or several. means, fix: what the line says, and what to do."""

    name: str
    texts: str
    seen: str
    means: str
    fix: str
    level: Level = Level.cause


P, JOB, HINT, CONSEQUENCE = Pattern, Level.whole_job, Level.hint, Level.consequence
PATTERNS = (
    # GPUs
    P("CUDA out of memory", "CUDA out of memory | CUDA error: out of memory",
      "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB",
      "the GPU has too little free memory", "a smaller global_batch_size=, or accumulate=2; nvidia-smi shows other processes on it"),
    P("CUDA kernel failed", "device-side assert triggered | illegal memory access was encountered",
      "RuntimeError: CUDA error: device-side assert triggered",
      "usually a label or index out of range; if it is always one host, its GPU may be faulty",
      "CUDA_LAUNCH_BLOCKING=1 shows the line; compare the labels with the number of classes"),
    P("GPU hardware failed", "NVRM: Xid | fallen off the bus | uncorrectable ECC error | Unable to determine the device handle",
      "NVRM: Xid (PCI:0000:06:00): 79, pid=1234, GPU has fallen off the bus.",
      "the hardware or its driver is at fault", "--exclude= that host, and tell the site with the Xid of dmesg"),
    P("no GPU", "No CUDA GPUs are available | no CUDA-capable device is detected | Found no NVIDIA driver | invalid device ordinal",
      "RuntimeError: No CUDA GPUs are available", "the job has no GPU, the driver is missing, or a rank selects a GPU that it does not see",
      "--gpus-per-node=; `srun nvidia-smi -L`; no --gpus-per-task or --gpu-bind; in a container, --nv or --gpus all"),
    P("two ranks on one GPU", "Duplicate GPU detected", "Duplicate GPU detected : rank 0 and rank 4 both on CUDA device 7000",
      "each GPU can have one rank only", "set_device(local_rank); as many tasks per node as GPUs; look at CUDA_VISIBLE_DEVICES"),
    # Network
    P("no such interface", "no socket interface found | no NCCL_SOCKET_IFNAME interface found | Unable to find address for: ",
      "node1:21:21 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
      "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that this node does not have",
      "unset it, or name one that `ip -br addr` shows on every node"),
    P("other node is not reached", "No route to host | Network is unreachable | Name or service not known",
      "socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host",
      "the interface does not reach the other node, a firewall blocks it, or its name is not in DNS",
      "srun --ntasks-per-node=1 python -m recipes.doctor, on the same nodes, finds the link"),
    P("port is taken", "Address already in use | EADDRINUSE",
      "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
      "another process, often of an earlier run, listens on rank 0's port", "set another MASTER_PORT for all ranks; `ss -ltnp` on its node"),
    P("InfiniBand call failed", "ibv_modify_qp failed | Call to ibv_reg_mr | Call to ibv_create | ibv_open_device failed",
      "node1:9:99 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
      "the limit on locked memory is too low, or two adapters do not reach each other",
      "`srun bash -c 'ulimit -l'` must print unlimited; NCCL_IB_HCA= the adapters of one fabric; test with NCCL_IB_DISABLE=1"),
    P("no answer over InfiniBand", "Got completion from peer | Got completion with error",
      "NET/IB : Got completion from peer 10.0.0.2<39138> with error 12, opcode 0, len 0, vendor err 129",
      "a link, a switch or the other node failed", "the other node may have died; otherwise ibdiagnet, or --exclude= the host", HINT),
    P("rank 0 cannot be reached", "client socket has timed out | seconds waiting for clients | connectFullMesh failed",
      "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
      "some ranks did not connect to the others", "see the logs of the missing ranks; MASTER_ADDR must be the first node on all ranks", HINT),
    # Memory and file systems
    P("memory is used up", "oom_kill event | oom-kill event | : Out Of Memory | xceeded job memory limit | exceeded memory limit | signal: Killed"
      " | can't allocate memory | [Errno 12] Cannot allocate memory",
      "slurmstepd: error: Detected 1 oom_kill event in StepId=45791123.batch. Some of the step tasks have been OOM Killed.",
      "the host's or the job's memory is used up", "more --mem (--mem=0 is all of the node), or fewer num_workers="),
    P("shared memory is full", "creating shared memory segment | failed to extend /dev/shm | signal: Bus error | insufficient shared memory",
      "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers are out of",
      "/dev/shm is too small for NCCL or for loader processes",
      "in a container --shm-size=16g or --ipc=host; `df -h /dev/shm`, remove old nccl-* there; fewer num_workers="),
    P("disk is full", "[Errno 28] No space left | [Errno 122] Disk quota exceeded", "OSError: [Errno 28] No space left on device",
      "the file system, or your quota there, is used up", "`df -h`, `df -i`, `quota -s`; another run_dir= or TMPDIR; fewer keep_checkpoints="),
    P("file system failed", "Input/output error | Stale file handle | Transport endpoint is not connected | Read-only file system",
      "OSError: [Errno 116] Stale file handle", "a disk, its server or the mount on this node failed",
      "dmesg on that host; --exclude= it, and tell the site"),
    P("too many open files", "Too many open files | received 0 items of ancdata", "OSError: [Errno 24] Too many open files",
      "the limit on open files is used up", "ulimit -n 65536 before srun; fewer loader processes"),
    # Slurm
    P("time limit or preemption", "DUE TO TIME LIMIT | DUE TO PREEMPTION",
      "slurmstepd: error: *** JOB 13055114 ON node17 CANCELLED AT 2020-07-11T22:48:26 DUE TO TIME LIMIT ***",
      "the job ran until its --time, or a job of higher priority took the nodes",
      "a longer --time; with --signal=USR2@120 and --requeue a recipe saves and is requeued", JOB),
    P("cancelled", " CANCELLED AT ", "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-01-01T00:00:00 ***",
      "scancel ended the job, or the launcher ended its step after a failure", "look at the rank that failed first, if there is one", JOB),
    P("node failure", "Node failure on | DUE TO NODE FAILURE", "srun: error: Node failure on node37",
      "a node died or was disconnected", "start the job again with --exclude= that node, and tell the site"),
    P("step was not started", "Job credential expired | slurmstepd: error: execve(): | Unable to create step | set by two different environment",
      "srun: error: Unable to create step for job 10: Error generating job credential",
      "a node could not start its task, or the shell has SLURM_* variables of another allocation",
      "check that the program exists on that node; unset SLURM_* variables of another job; compare srun's options with sbatch's"),
    # Programs
    P("environment does not fit", "ModuleNotFoundError: | undefined symbol: | version `GLIBC | version `CXXABI | ImportError: lib"
      " | Mismatched NCCL version",
      "ModuleNotFoundError: No module named 'torchvision'", "another environment or other libraries are active on this node",
      "activate the environment in the script, before srun; `srun which python`; look at LD_LIBRARY_PATH"),
    P("crash in native code", "Segmentation fault | SIGSEGV", "srun: error: node76: task 0: Segmentation fault (core dumped)",
      "a library crashed: often incompatible libraries, or a full /dev/shm", "PYTHONFAULTHANDLER=1 shows where"),
    P("killed", ": Killed | SIGKILL | exitcode: -9", "srun: error: node1: task 5: Killed",
      "the memory was used up, or srun ended the other ranks", "sacct -j JOB -o state,maxrss,reqmem; dmesg on that host", HINT),
    # Consequences
    P("collective timed out", "Watchdog caught collective operation timeout | flight recorder dump signal from another rank",
      "[rank0]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580",
      "a rank did not reach this collective: it ended, is slow, or took another branch of the code",
      "find the rank that does not wait there (the lowest SeqNum, or none)", CONSEQUENCE),
    P("lost another rank", "Connection closed by peer | Connection reset by peer | Connection closed by remote peer | ncclRemoteError"
      " | got 0 bytes | Broken pipe | Did the remote server shutdown",
      "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.8]:22676",
      "another rank ended, or did not arrive", "look at the rank that failed first", CONSEQUENCE),
    P("ended by the launcher", ": Terminated | Exited with exit code | closing signal SIGTERM | ChildFailedError",
      "srun: error: node-10-95: task 0: Exited with exit code 1",
      "the launcher, Slurm or scancel ended it", "look at the rank that failed first", CONSEQUENCE),
)  # fmt: skip
