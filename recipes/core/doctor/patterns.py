"""Known lines of torch, NCCL, CUDA, Slurm, the kernel and Python: what each means, and what to do
about it.

The texts are plain, without regular expressions: looking for all of them takes time in proportion
to the size of the logs. No text may match a line that this project prints itself.
"""

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """What a line says about the failure; lower levels are closer to its cause."""

    cause = 0
    # no single rank is to blame. A job that hangs after a rank's failure ends at its time limit,
    # too
    whole_job = 1
    hint = 2  # something is wrong, and the line does not say what
    consequence = 3  # another rank is gone


@dataclass(frozen=True)
class Pattern:
    """texts: parts of real lines, separated by " | ". means, fix: what such a line says, and what
    to do.
    """

    name: str
    texts: str
    means: str
    fix: str
    level: Level = Level.cause


P = Pattern
JOB = Level.whole_job
HINT = Level.hint
CONSEQUENCE = Level.consequence
PATTERNS = (
    # GPUs
    P(
        "CUDA out of memory",
        "CUDA out of memory | CUDA error: out of memory",
        "the GPU has too little free memory",
        "lower global_batch_size=, or give accumulate=2; check nvidia-smi for other processes on "
        "the GPU",
    ),
    P(
        "CUDA kernel failed",
        "device-side assert triggered | illegal memory access was encountered",
        "usually, a label or index is out of range; if this always happens on the same host, "
        "a GPU there may be faulty",
        "set CUDA_LAUNCH_BLOCKING=1 to see which line of code fails; "
        "compare the labels with the number of classes",
    ),
    P(
        "GPU hardware failed",
        "NVRM: Xid | fallen off the bus | uncorrectable ECC error"
        " | Unable to determine the device handle",
        "the hardware or its driver is at fault",
        "exclude that host (--exclude=HOST), and send the Xid line of dmesg to the administrators",
    ),
    P(
        "no GPU",
        "No CUDA GPUs are available | no CUDA-capable device is detected | Found no NVIDIA driver"
        " | invalid device ordinal",
        "the job has no GPU, the driver is missing, or a rank selects a GPU that it does not see",
        "give --gpus-per-node=N, without --gpus-per-task and --gpu-bind; a container also needs "
        "--nv or --gpus all; test with `srun nvidia-smi -L`",
    ),
    P(
        "two ranks on one GPU",
        "Duplicate GPU detected",
        "each GPU can have only one rank",
        "call set_device(local_rank); start one task per GPU; check CUDA_VISIBLE_DEVICES",
    ),
    # Network
    P(
        "no such interface",
        "no socket interface found | no NCCL_SOCKET_IFNAME interface found"
        " | Unable to find address for: ",
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that this node does not have",
        "unset the variable, or set it to an interface that `ip -br addr` shows on every node",
    ),
    P(
        "another node cannot be reached",
        "No route to host | Network is unreachable | Name or service not known",
        "the network interface does not reach the other node, a firewall blocks the connection, "
        "or the node's name is not in DNS",
        "run `srun --ntasks-per-node=1 python -m recipes.doctor` on the same nodes: "
        "it finds the broken link",
    ),
    P(
        "port is taken",
        "Address already in use | EADDRINUSE",
        "another process, often of an earlier run, listens on rank 0's port",
        "set another MASTER_PORT for all ranks; `ss -ltnp` finds the process",
    ),
    P(
        "InfiniBand call failed",
        "ibv_modify_qp failed | Call to ibv_reg_mr | Call to ibv_create | ibv_open_device failed",
        "the limit on locked memory is too low, or two adapters do not reach each other",
        "`srun bash -c 'ulimit -l'` must print unlimited; set NCCL_IB_HCA to the adapters of one "
        "fabric; test the job with NCCL_IB_DISABLE=1",
    ),
    P(
        "no answer over InfiniBand",
        "Got completion from peer | Got completion with error",
        "a link, a switch or the other node failed",
        "check whether the other node died; if not, run ibdiagnet, or exclude that node",
        HINT,
    ),
    P(
        "rank 0 cannot be reached",
        "client socket has timed out | seconds waiting for clients | connectFullMesh failed",
        "some ranks did not connect to the others",
        "see the logs of the missing ranks; MASTER_ADDR must be rank 0's host on all ranks",
        HINT,
    ),
    # Memory and file systems
    P(
        "memory is used up",
        "since its limit of | oom_kill event | oom-kill event"
        " | : Out Of Memory | xceeded job memory limit | exceeded memory limit | signal: Killed"
        " | can't allocate memory | [Errno 12] Cannot allocate memory",
        "the host's or the job's memory is used up",
        "request more with --mem (--mem=0: all memory of the node), or lower num_workers=",
    ),
    P(
        "shared memory is full",
        "creating shared memory segment | unable to allocate shared memory"
        " | failed to extend /dev/shm | signal: Bus error | insufficient shared memory",
        "/dev/shm is too small for NCCL or for loader processes",
        "in a container, use --shm-size=16g or --ipc=host; remove old /dev/shm/nccl-*"
        " (check with `df -h /dev/shm`); lower num_workers=",
    ),
    P(
        "disk is full",
        "[Errno 28] No space left | [Errno 122] Disk quota exceeded",
        "the file system is full, or your quota there is used up",
        "`df -h`, `df -i` and `quota -s` show the limit; use another run_dir= or TMPDIR, "
        "or a smaller keep_checkpoints=",
    ),
    P(
        "file system failed",
        "Input/output error | Stale file handle | Transport endpoint is not connected"
        " | Read-only file system",
        "a disk, its server or the mount on this node failed",
        "see dmesg on that host; exclude it, and tell the administrators",
    ),
    P(
        "too many open files",
        "Too many open files | received 0 items of ancdata",
        "the limit on open files is reached",
        "run `ulimit -n 65536` before srun, or use fewer loader processes",
    ),
    # Slurm
    P(
        "time limit or preemption",
        "DUE TO TIME LIMIT | DUE TO PREEMPTION",
        "the job reached its time limit (--time), or a job of higher priority took the nodes",
        "give a longer --time=; with --signal=USR2@120 and --requeue,"
        " a recipe saves a checkpoint, and its job is requeued",
        JOB,
    ),
    P(
        "cancelled",
        " CANCELLED AT ",
        "scancel ended the job, or the launcher ended its step after a failure",
        "look at the rank that failed first, if there is one",
        JOB,
    ),
    P(
        "node failure",
        "Node failure on | DUE TO NODE FAILURE",
        "a node died or was disconnected",
        "start the job again with --exclude=NODE, and tell the administrators",
    ),
    P(
        "step was not started",
        "Job credential expired | slurmstepd: error: execve(): | Unable to create step"
        " | set by two different environment",
        "a node could not start its task, or the shell has SLURM_* variables of another allocation",
        "check that the program exists on that node; unset SLURM_* variables of another job; "
        "compare srun's options with sbatch's",
    ),
    # Programs
    P(
        "address space is limited",
        "failed to map segment from shared object | Memory allocation still failed after",
        "a limit of the address space (ulimit -v) is too small to load torch",
        "remove ulimit -v from your shell's startup files, and limit memory with --mem instead",
    ),
    P(
        "wrong environment or library",
        "ModuleNotFoundError: | undefined symbol: | version `GLIBC | version `CXXABI"
        " | ImportError: lib | Mismatched NCCL version",
        "another environment or other libraries are active on this node",
        "activate the environment in the script, before srun; check `srun which python` and "
        "LD_LIBRARY_PATH",
    ),
    P(
        "crash in native code",
        "Segmentation fault | SIGSEGV",
        "a library crashed, often because libraries are incompatible or /dev/shm is full",
        "set PYTHONFAULTHANDLER=1 to see where it crashed",
    ),
    P(
        "killed",
        ": Killed | SIGKILL | exitcode: -9",
        "the memory was used up, or srun ended the other ranks",
        "run sacct -j JOB -o state,maxrss,reqmem; see dmesg on that host",
        HINT,
    ),
    # Consequences
    P(
        "collective timed out",
        "Watchdog caught collective operation timeout"
        " | flight recorder dump signal from another rank",
        "a rank did not reach this collective: it ended, is slow, "
        "or took another branch of the code",
        "find the rank that did not reach the collective: its log has the lowest SeqNum, or none",
        CONSEQUENCE,
    ),
    P(
        "lost another rank",
        "Connection closed by peer | Connection reset by peer | Connection closed by remote peer"
        " | ncclRemoteError | got 0 bytes | Broken pipe | Did the remote server shutdown",
        "another rank ended, or did not reach this point",
        "look at the rank that failed first",
        CONSEQUENCE,
    ),
    P(
        "ended by the launcher",
        ": Terminated | Exited with exit code | closing signal SIGTERM | ChildFailedError",
        "the launcher, Slurm or scancel ended this process",
        "look at the rank that failed first",
        CONSEQUENCE,
    ),
)
