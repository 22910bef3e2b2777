"""Known lines of logs: what each means, and what to do about it.

A signature is plain text with gaps and no regular expression, so that looking for all of them takes time in proportion to the
size of the logs. Where a line fits several signatures, the first in the table counts.
"""

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """What a line says about the failure; lower levels are closer to its cause."""

    cause = 0
    error = 1  # an exception that is not in the table
    hint = 2  # something is wrong, and the line does not say what
    consequence = 3  # another rank is gone
    harmless = 4  # looks like an error and is none


@dataclass(frozen=True)
class Signature:
    """A known line. pattern: alternative wordings, separated by " | "; … in a wording stands for anything on the same line.

    means, fix: what the line says, and what to do. whole_job: no single rank is to blame.
    """

    name: str
    pattern: str
    means: str
    fix: str
    level: Level = Level.cause
    whole_job: bool = False


S, HINT, CONSEQUENCE, HARMLESS = Signature, Level.hint, Level.consequence, Level.harmless
SIGNATURES = (
    # Last lines of these recipes
    S("a rank lost its peers", "lost its peers",
      "another rank ended before this one", "look at the rank that failed first", CONSEQUENCE),
    S("a rank that hung", "got no further than | made no progress with | made no progress for",
      "it hung, was stopped, or its node was disconnected, and the others timed out waiting for it",
      "its stack is in logs/ of that rank; if nothing hangs, raise timeout_s=", HINT),
    S("a rank without an error record", "exited without an error record",
      "another process killed it, or its node died", "see srun's lines and dmesg on its host; often memory: more --mem", HINT),
    S("ranks that did not arrive", "did not come in time (timeout_s) | seconds waiting for clients | seconds waiting for workers",
      "some ranks did not connect to the others", "see the logs of the missing ranks, and the number of tasks",
      HINT),
    # Harmless lines that look like errors
    S("no host name of a client", "hostname of the client socket cannot be retrieved",
      "no reverse DNS here", "nothing; it only delays the start by some seconds", HARMLESS),
    S("IPv6 tried first", "client socket cannot be initialized…Address family not supported",
      "torch tries IPv6 and continues with IPv4", "nothing", HARMLESS),
    S("rank 0 was not yet listening", "client socket has failed to connect to…(errno | Connection refused, retrying",
      "torch tries again", "nothing, unless it repeats for minutes", HARMLESS),
    S("no NCCL plugin", "libnccl-…cannot open shared object file | Could not find: libnccl-",
      "NCCL uses its own transports", "nothing, unless your fabric requires a plugin (EFA, Slingshot)", HARMLESS),
    S("process group not destroyed", "destroy_process_group() was not called | process group has NOT been destroyed",
      "the process ended without destroying its process group", "nothing", HARMLESS),
    # NCCL
    S("NCCL finds no interface", "no socket interface found | no NCCL_SOCKET_IFNAME interface found | is neither AF_INET(2) nor AF_INET6",
      "NCCL_SOCKET_IFNAME names an interface that this node does not have", "unset it, or name one that `ip -br addr` shows on every node"),
    S("memory cannot be locked", "ibv_…Cannot allocate memory | fi_mr_reg…Cannot allocate memory",
      "the limit on locked memory is too low for InfiniBand",
      "`srun bash -c 'ulimit -l'` must print unlimited: the site sets LimitMEMLOCK=infinity for slurmd"),
    S("InfiniBand cannot connect", "ibv_modify_qp failed",
      "two adapters do not reach each other: different fabrics, or an invalid GID",
      "NCCL_IB_HCA= the adapters of one fabric; leave NCCL_IB_GID_INDEX unset; try NCCL_IB_DISABLE=1"),
    S("InfiniBand call failed", "NCCL WARN Call to ibv_ | ibv_open_device failed | ibv_get_async_event",
      "the adapter or its driver refused", "ibstat and dmesg on that host; --exclude= it, or test with NCCL_IB_DISABLE=1"),
    S("no answer over InfiniBand", "Got completion from peer | Got completion with error",
      "a link, a switch or the other node failed",
      "the node at the other end may have died; otherwise ibdiagnet, --exclude= the host, a higher NCCL_IB_TIMEOUT", HINT),
    S("different versions of NCCL", "Mismatched NCCL version",
      "the nodes loaded different versions of NCCL", "use the same environment on all nodes; look at LD_LIBRARY_PATH and LD_PRELOAD"),
    S("two ranks on one GPU", "Duplicate GPU detected | have the same GPU",
      "each GPU can have one rank only", "set_device(local_rank); as many tasks per node as GPUs; look at CUDA_VISIBLE_DEVICES"),
    S("shared memory is full", "Error while creating shared memory segment | failed to extend /dev/shm | posix_fallocate failed…No space left"
      " | is killed by signal: Bus error | insufficient shared memory | unable to open shared memory object",
      "/dev/shm is too small for NCCL or for loader processes",
      "in a container --shm-size=16g or --ipc=host; `df -h /dev/shm`, remove old nccl-* there; fewer num_workers="),
    S("GPUs without peer access", "peer access is not supported",
      "these two GPUs cannot read each other's memory", "NCCL_P2P_DISABLE=1; or give each task all GPUs (no --gpus-per-task)"),
    # Ordinary networks
    S("no route between nodes", "No route to host | Network is unreachable",
      "the chosen interface does not reach the other node, or a firewall blocks it",
      "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that `ip route get ADDRESS` shows for the other node"),
    S("gloo finds no interface", "Unable to find address for",
      "GLOO_SOCKET_IFNAME names no interface of this node, or the host name is not in DNS", "unset it, or give one name (no ^, no list)"),
    S("own host name not resolved", "Unable to resolve hostname to a (local) address",
      "gloo uses loopback, which other nodes do not reach", "set GLOO_SOCKET_IFNAME to the fabric's interface", HINT),
    S("host name not resolved", "Name or service not known | nodename nor servname provided | Temporary failure in name resolution",
      "this node does not know a host name", "set MASTER_ADDR to a name or address that `getent hosts` finds on every node"),
    S("port is taken", "EADDRINUSE | Address already in use | failed to listen on any local network address | : port…is in use; set MASTER_PORT",
      "another process, often of an earlier run, listens on rank 0's port", "set another MASTER_PORT for all ranks; `ss -ltnp` on rank 0's node"),
    S("GPU call in NCCL failed", "unhandled cuda error | ncclUnhandledCudaError",
      "a CUDA call failed inside NCCL", "NCCL_DEBUG=WARN names it", HINT),
    S("system call in NCCL failed", "ncclSystemError | unhandled system error",
      "the system refused a socket, a file or memory", "NCCL_DEBUG=WARN names it; see also the lines around this one", HINT),
    S("invalid use of NCCL", "ncclInvalidUsage | ncclInvalidArgument | ncclInternalError",
      "ranks, GPUs or versions are incompatible", "NCCL_DEBUG=WARN names it", HINT),
    S("NCCL lost a rank", "ncclRemoteError | remote process exited | NCCL WARN…Connection closed by remote peer | NCCL WARN…Connection reset by peer"
      " | NCCL WARN…Broken pipe",
      "another rank ended", "look at the rank that failed first", CONSEQUENCE),
    S("collective timed out", "Watchdog caught collective operation timeout | watchdog thread terminated with exception"
      " | dump signal from another rank | dump signal due to a collective timeout | eartbeat monitor timed out",
      "a rank did not reach this collective: it ended, is slow, or took another branch of the code",
      "find the rank that does not wait there (the lowest SeqNum, or none); TORCH_DISTRIBUTED_DEBUG=DETAIL", CONSEQUENCE),
    S("ranks in different collectives", "Detected mismatch between collectives",
      "the ranks took different branches of the code", "no collective inside `if rank == 0`; the same number of batches on each"),
    S("gloo lost a rank", "Connection closed by peer | Connection reset by peer | Application timeout caused pair closure"
      " | Timed out waiting…for recv operation | Timed out waiting…for send operation | Broken pipe",
      "another rank ended, or did not arrive", "look at the rank that failed first", CONSEQUENCE),
    S("gloo cannot connect", "connectFullMesh failed",
      "the ranks cannot reach each other", "set GLOO_SOCKET_IFNAME to the fabric's interface; no 127.0.1.1 for the host in /etc/hosts", HINT),
    S("connection to rank 0 lost", "Did the remote server shutdown or crash | failed to recv, got 0 bytes | Failed to recv, got 0 bytes"
      " | recvValue failed | sendBytes failed | wait timeout after…keys | DistStoreError: Socket Timeout | Socket Timeout",
      "rank 0 ended first, or a rank did not arrive", "look at rank 0's log, and at the rank that is named first", CONSEQUENCE),
    S("rank 0 cannot be reached", "client socket has timed out | cannot reach rank 0 at | failed to connect to any network address",
      "rank 0 does not listen there, or a firewall blocks it", "check that MASTER_ADDR is the first node on all ranks, and that rank 0 is running", HINT),
    S("connection refused", "Connection refused | Connection timed out",
      "nothing listens there: the other rank ended or has not started, or the address is wrong",
      "look for an earlier error on that host; otherwise check NCCL_SOCKET_IFNAME", HINT),
    # GPUs
    S("CUDA out of memory", "CUDA out of memory | OutOfMemoryError | CUDA error: out of memory | Cuda failure…out of memory",
      "the GPU has too little free memory", "a smaller global_batch_size=, or accumulate=2; nvidia-smi shows other processes on it"),
    S("memory is full", "can't allocate memory | std::bad_alloc | MemoryError | Cannot allocate memory | : out of memory: ",
      "the host's or the job's memory is used up", "more --mem (--mem=0 is all of the node), or fewer num_workers="),
    S("assertion on the GPU", "device-side assert triggered",
      "usually a label or index out of range", "CUDA_LAUNCH_BLOCKING=1 shows the line; compare the labels with the number of classes"),
    S("GPU memory error", "uncorrectable ECC error | Uncorrectable ECC error | uncorrectable NVLink error",
      "the hardware is at fault", "--exclude= that host, and tell the site"),
    S("GPU is lost", "fallen off the bus | NVRM: Xid | GPU is lost | Unable to determine the device handle",
      "the hardware or its driver is at fault", "--exclude= that host, and tell the site with the Xid of dmesg"),
    S("illegal memory access on the GPU", "illegal memory access was encountered | misaligned address | unspecified launch failure | illegal instruction was",
      "a kernel accessed memory out of bounds, or the GPU is faulty", "CUDA_LAUNCH_BLOCKING=1 names the call; if it is always one host, --exclude= it"),
    S("GPU not supported by torch", "no kernel image is available",
      "this build of torch has no code for this GPU", "install another build: compare torch.cuda.get_arch_list() with the GPU"),
    S("driver is too old", "driver on your system is too old | driver version is insufficient | Driver/library version mismatch"
      " | forward compatibility was attempted",
      "torch's CUDA requires a newer driver", "install a build of torch for the CUDA version that nvidia-smi shows"),
    S("GPU is busy", "devices are busy or unavailable | device(s) is/are busy or unavailable",
      "another process has it in exclusive mode, or it is broken", "nvidia-smi on that host shows other processes; without any, --exclude= it"),
    S("no GPU", "no CUDA-capable device | No CUDA GPUs are available | Found no NVIDIA driver | and torch sees",
      "the job has no GPU, or the driver is missing", "--gpus-per-node=; `srun nvidia-smi -L`; in a container, --nv or --gpus all"),
    S("no such GPU number", "invalid device ordinal",
      "a rank selects a GPU that it does not see", "no --gpus-per-task or --gpu-bind; otherwise device 0 in each rank"),
    # Slurm
    S("time limit", "DUE TO TIME LIMIT", "the job ran until its --time",
      "a longer --time; with --signal=USR2@120 a recipe saves before the limit and is requeued", whole_job=True),
    S("preemption", "DUE TO PREEMPTION", "a job of higher priority took the nodes",
      "if its job is not pending again, start it again with the same run_dir=; with --requeue, Slurm does so", whole_job=True),
    S("node failure", "Node failure on | DUE TO NODE FAILURE", "a node died or was disconnected",
      "if its job is not pending again, start it again with --exclude= that node; report the node to the site"),
    S("job's memory is used up", "oom_kill event | oom-kill event | : Out Of Memory | OOM Killed | xceeded job memory limit | xceeded step memory limit"
      " | exceeded memory limit | is killed by signal: Killed",
      "Slurm or the kernel killed a process for its memory", "more --mem (--mem=0 is all of the node), or fewer num_workers="),
    S("step was not started", "ask launch for | Application launch failed | Job credential expired | execve(): ",
      "a node could not start its task", "check that the program exists on that node; otherwise tell the site (clocks, munge), and --exclude= it"),
    S("variables of two allocations", "set by two different environment variables | SLURM_TRES_PER_TASK is mutually exclusive",
      "the shell has SLURM_* variables of another allocation, which srun refuses from Slurm 24.11 on",
      "unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU, and give srun --cpus-per-task", whole_job=True),
    S("step exceeds the job", "Unable to create step", "srun requests more than the job has",
      "compare srun's options with sbatch's; unset SLURM_* of another job", whole_job=True),
    S("job was refused", "Invalid account | Invalid qos | nvalid partition | Unable to allocate resources | job submission failed",
      "Slurm refused the job", "use -A and -p as `sacctmgr show assoc user=$USER` and `sinfo -s` show", whole_job=True),
    S("crash in native code", "Segmentation fault | SIGSEGV | task…: Bus error | Illegal instruction | SIGBUS",
      "a library crashed: often incompatible libraries, or a full /dev/shm", "PYTHONFAULTHANDLER=1 shows where; use the same versions on all nodes"),
    S("killed", "srun: error:…task…: Killed | : line…Killed | SIGKILL | exitcode: -9",
      "the memory was used up, or srun ended the other ranks", "sacct -j JOB -o state,maxrss,reqmem; dmesg on that host", HINT),
    S("ended by the launcher", "srun: error:…task…: Terminated | srun: error:…task…: Aborted | Exited with exit code | CANCELLED AT"
      " |  SIGTERM | .SIGTERM | (SIGTERM | SIGABRT | ChildFailedError | SignalException | KeyboardInterrupt",
      "the launcher, Slurm or scancel ended it", "look at the rank that failed first", CONSEQUENCE),
    # Data and file systems
    S("disk is full", "No space left on device", "the file system has no free space or inodes", "`df -h` and `df -i` there; another run_dir=, stage_dir= or TMPDIR"),
    S("quota is used up", "Disk quota exceeded", "your quota there is used up", "`quota -s` or `lfs quota`; another run_dir=, or fewer keep_checkpoints="),
    S("stale file handle", "Stale file handle", "a file was replaced or removed on the server", "start the run again; does another program write there?"),
    S("file server is lost", "Transport endpoint is not connected | Cannot send after transport endpoint shutdown",
      "this node lost the mount", "--exclude= that host, and tell the site; run_dir= or data_dir= elsewhere"),
    S("disk cannot be read", "Input/output error", "the disk or its file server fails", "dmesg on that host; --exclude= it; stage_dir= for data"),
    S("disk is read-only", "Read-only file system", "the file system is mounted read-only", "another run_dir=, TMPDIR or TORCH_HOME"),
    S("too many open files", "Too many open files | received 0 items of ancdata",
      "the limit on open files is used up", "ulimit -n 65536 before srun; torch.multiprocessing.set_sharing_strategy(\"file_system\"); fewer loader processes"),
    S("permission denied", "Permission denied", "this user has no permission for that on this node", "`ls -ld` the path on that node, and the folders above it"),
    S("loader process ended", "DataLoader worker (pid", "a loader process ended", "num_workers=0 shows its error; otherwise memory: more --mem", HINT),
    # Python and libraries
    S("module is missing", "ModuleNotFoundError | ImportError: cannot import name", "another environment is active on this node, or a package is missing",
      "activate the environment in the script, before srun; `srun which python`"),
    S("C or C++ library is too old", "version `GLIBC | version `CXXABI", "a library was built on a newer system",
      "put conda's libstdc++ or a module's gcc first in LD_LIBRARY_PATH; or install another build"),
    S("incompatible libraries", "undefined symbol:", "it was built against another version", "install torch and the packages built on it together; look at LD_LIBRARY_PATH"),
    S("library is missing", "cannot open shared object file", "libcuda: no driver on this node; otherwise a module is not loaded",
      "load the modules in the script; use a GPU partition, or in a container --nv"),
    S("file is missing", "FileNotFoundError | No such file or directory:", "this node does not see the file", "`srun ls` it; the path must be on a shared file system"),
    S("checkpoint does not fit", "Error(s) in loading state_dict | PytorchStreamReader failed | size mismatch for",
      "it belongs to another model, or is damaged", "use the keys that it was made with, or an older one with resume="),
    # Training
    S("loss is not finite", " is nan: a lower lr | is inf: a lower lr | is -inf: a lower lr | loss nan | loss: nan | loss=nan | Loss: nan | Loss nan | Loss=nan"
      " | loss': nan | oss is nan | loss': tensor(nan",
      "the training has diverged", "a lower lr, a longer warm-up, clipped gradients; dtype=float32 to see; look at the data"),
    S("parameters without gradient", "Expected to have finished reduction in the prior iteration",
      "DDP waits for a gradient that this step did not compute", "find_unused_parameters=True, or use all parameters in each step"),
)  # fmt: skip
EXCEPTION = Signature(
    "the program's own error", "Traceback (most recent call last)", "Python's traceback says where", "read it there", Level.error,
)  # fmt: skip
