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
    sign = 2  # something is wrong, and the line does not say what
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


S, SIGN, CONSEQUENCE, HARMLESS = Signature, Level.sign, Level.consequence, Level.harmless
SIGNATURES = (
    # This project's own last lines
    S("a rank lost its peers", "lost its peers",
      "another rank was gone before this one", "look at the rank that is named first", CONSEQUENCE),
    S("a rank that stood still", "got no further than | got no further with | made no progress for",
      "it hung, was stopped, or its node was cut off, and the others waited for it in vain",
      "its stack is in logs/ of that rank; where nothing hangs, a longer timeout_s=", SIGN),
    S("a rank that left no error record", "exited without an error record | ended without a word",
      "it was killed from outside, or with its node", "srun's lines and dmesg on its host tell; often memory: more --mem", SIGN),
    S("ranks that never came", "did not come in time (timeout_s) | seconds waiting for clients | seconds waiting for workers",
      "the ranks waited for others that never reached them", "look for what kept those: their logs, or a lower task count",
      SIGN),
    # Harmless, and easily taken for something else
    S("client's host name", "hostname of the client socket cannot be retrieved",
      "no reverse DNS here", "nothing; it only costs some seconds at the start", HARMLESS),
    S("IPv6 tried first", "client socket cannot be initialized…Address family not supported",
      "torch tries IPv6 and goes on with IPv4", "nothing", HARMLESS),
    S("rank 0 was not yet there", "client socket has failed to connect to…(errno | Connection refused, retrying",
      "it is tried again", "nothing, unless it goes on for minutes", HARMLESS),
    S("no NCCL plugin", "libnccl-…cannot open shared object file | Could not find: libnccl-",
      "NCCL uses its own transports", "nothing, unless your fabric wants a plugin (EFA, Slingshot)", HARMLESS),
    S("group not taken down", "destroy_process_group() was not called | process group has NOT been destroyed",
      "the process ended without a tidy end", "nothing", HARMLESS),
    # NCCL
    S("NCCL finds no interface", "no socket interface found | no NCCL_SOCKET_IFNAME interface found | is neither AF_INET(2) nor AF_INET6",
      "NCCL_SOCKET_IFNAME names an interface that this node does not have", "unset it, or name one that `ip -br addr` shows on every node"),
    S("memory cannot be locked", "ibv_…Cannot allocate memory | fi_mr_reg…Cannot allocate memory",
      "the limit on locked memory is too low for InfiniBand",
      "`srun bash -c 'ulimit -l'` has to say unlimited: the site sets LimitMEMLOCK=infinity for slurmd"),
    S("InfiniBand cannot connect", "ibv_modify_qp failed",
      "two adapters do not reach each other: other fabrics, or a wrong GID",
      "NCCL_IB_HCA= the adapters of one fabric; leave NCCL_IB_GID_INDEX unset; try NCCL_IB_DISABLE=1"),
    S("InfiniBand call failed", "NCCL WARN Call to ibv_ | ibv_open_device failed | ibv_get_async_event",
      "the adapter or its driver refused", "ibstat and dmesg on that host; --exclude= it, or NCCL_IB_DISABLE=1 to see"),
    S("InfiniBand lost a packet's peer", "Got completion from peer | Got completion with error",
      "no answer over InfiniBand: a link, a switch, or the other node is gone",
      "the node at the other end may have died; else ibdiagnet, --exclude= the host, a higher NCCL_IB_TIMEOUT", SIGN),
    S("other versions of NCCL", "Mismatched NCCL version",
      "the nodes have loaded different NCCL", "the same environment on each; look at LD_LIBRARY_PATH and LD_PRELOAD"),
    S("two ranks on one GPU", "Duplicate GPU detected | have the same GPU",
      "there is one rank per GPU", "set_device(local_rank); as many tasks as GPUs a node; look at CUDA_VISIBLE_DEVICES"),
    S("shared memory is full", "Error while creating shared memory segment | failed to extend /dev/shm | posix_fallocate failed…No space left"
      " | is killed by signal: Bus error | insufficient shared memory | unable to open shared memory object",
      "/dev/shm is too small for NCCL or for loader processes",
      "in a container --shm-size=16g or --ipc=host; `df -h /dev/shm`, remove old nccl-* there; fewer num_workers="),
    S("GPUs without peer access", "peer access is not supported",
      "these two GPUs cannot read each other's memory", "NCCL_P2P_DISABLE=1; or give each task all GPUs (no --gpus-per-task)"),
    # Ordinary networks
    S("no route between nodes", "No route to host | Network is unreachable",
      "the interface that was chosen does not reach the other node, or a firewall refuses",
      "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME= what `ip route get` the other node's address shows"),
    S("gloo finds no interface", "Unable to find address for",
      "GLOO_SOCKET_IFNAME names no interface of this node, or its name is not in DNS", "unset it, or give one name (no ^, no list)"),
    S("own name not resolved", "Unable to resolve hostname to a (local) address",
      "gloo has fallen back to loopback, which other nodes do not reach", "GLOO_SOCKET_IFNAME= the fabric's interface", SIGN),
    S("name not resolved", "Name or service not known | nodename nor servname provided | Temporary failure in name resolution",
      "a host name is unknown here", "MASTER_ADDR= a name or address that `getent hosts` finds on every node"),
    S("port is taken", "EADDRINUSE | Address already in use | failed to listen on any local network address | : port…is in use; set MASTER_PORT",
      "another process, often an earlier run's, listens on rank 0's port", "another MASTER_PORT for all ranks; `ss -ltnp` on rank 0's node"),
    S("GPU call in NCCL failed", "unhandled cuda error | ncclUnhandledCudaError",
      "a CUDA call failed inside NCCL", "NCCL_DEBUG=WARN names it", SIGN),
    S("system call in NCCL failed", "ncclSystemError | unhandled system error",
      "a socket, a file or memory was refused", "NCCL_DEBUG=WARN names it; the lines around it may", SIGN),
    S("NCCL used wrongly", "ncclInvalidUsage | ncclInvalidArgument | ncclInternalError",
      "ranks, GPUs or versions do not fit together", "NCCL_DEBUG=WARN names it", SIGN),
    S("NCCL lost a rank", "ncclRemoteError | remote process exited | NCCL WARN…Connection closed by remote peer | NCCL WARN…Connection reset by peer"
      " | NCCL WARN…Broken pipe",
      "another rank was gone", "look at the rank that is named first", CONSEQUENCE),
    S("collective timed out", "Watchdog caught collective operation timeout | watchdog thread terminated with exception"
      " | dump signal from another rank | dump signal due to a collective timeout | eartbeat monitor timed out",
      "a rank did not come to this collective: dead, slow, or another way through the code",
      "find the rank that does not wait there (the lowest SeqNum, or none); TORCH_DISTRIBUTED_DEBUG=DETAIL", CONSEQUENCE),
    S("ranks in different collectives", "Detected mismatch between collectives",
      "the ranks take different ways through the code", "no collective inside `if rank == 0`; the same number of batches on each"),
    S("gloo lost a rank", "Connection closed by peer | Connection reset by peer | Application timeout caused pair closure"
      " | Timed out waiting…for recv operation | Timed out waiting…for send operation | Broken pipe",
      "another rank was gone, or did not come", "look at the rank that is named first", CONSEQUENCE),
    S("gloo cannot connect", "connectFullMesh failed",
      "the ranks cannot reach each other", "GLOO_SOCKET_IFNAME= the fabric's interface; no 127.0.1.1 for the host in /etc/hosts", SIGN),
    S("rank 0's store is gone", "Did the remote server shutdown or crash | failed to recv, got 0 bytes | Failed to recv, got 0 bytes"
      " | recvValue failed | sendBytes failed | wait timeout after…keys | DistStoreError: Socket Timeout | Socket Timeout",
      "rank 0 ended first, or a rank did not come", "look at rank 0's log, and at the rank that is named first", CONSEQUENCE),
    S("rank 0 is not reached", "client socket has timed out | cannot reach rank 0 at | failed to connect to any network address",
      "rank 0 does not listen there, or a firewall is between", "is MASTER_ADDR the first node, the same on all, and rank 0 alive?", SIGN),
    S("connection refused", "Connection refused | Connection timed out",
      "nothing listens there: the other rank is gone or not yet there, or it is the wrong address",
      "look for an earlier error on that host; else NCCL_SOCKET_IFNAME", SIGN),
    # GPUs
    S("CUDA out of memory", "CUDA out of memory | OutOfMemoryError | CUDA error: out of memory | Cuda failure…out of memory",
      "the GPU's memory does not hold it", "a smaller global_batch_size=, or accumulate=2; nvidia-smi shows whose else is there"),
    S("memory is full", "can't allocate memory | std::bad_alloc | MemoryError | Cannot allocate memory | : out of memory: ",
      "the host's or the job's memory is used up", "more --mem (--mem=0 is all of the node), or fewer num_workers="),
    S("assertion on the GPU", "device-side assert triggered",
      "mostly a label or index out of range", "CUDA_LAUNCH_BLOCKING=1 shows the line; compare labels with the classes"),
    S("GPU's memory is damaged", "uncorrectable ECC error | Uncorrectable ECC error | uncorrectable NVLink error",
      "the hardware is at fault", "--exclude= that host, and tell the site"),
    S("GPU is gone", "fallen off the bus | NVRM: Xid | GPU is lost | Unable to determine the device handle",
      "the hardware or its driver is at fault", "--exclude= that host, and tell the site with the Xid of dmesg"),
    S("GPU went astray", "illegal memory access was encountered | misaligned address | unspecified launch failure | illegal instruction was",
      "a kernel went beyond its memory, or the GPU is faulty", "CUDA_LAUNCH_BLOCKING=1 names the call; always one host: --exclude= it"),
    S("torch without this GPU", "no kernel image is available",
      "this build of torch has no code for this GPU", "another build: compare torch.cuda.get_arch_list() with the GPU"),
    S("driver is too old", "driver on your system is too old | driver version is insufficient | Driver/library version mismatch"
      " | forward compatibility was attempted",
      "torch's CUDA wants a newer driver", "a build of torch for the CUDA version that nvidia-smi shows"),
    S("GPU is taken", "devices are busy or unavailable | device(s) is/are busy or unavailable",
      "another process has it in exclusive mode, or it is broken", "nvidia-smi on that host; two ranks on one GPU? else --exclude= it"),
    S("no GPU", "no CUDA-capable device | No CUDA GPUs are available | Found no NVIDIA driver | and torch sees",
      "the job was given none, or the driver is not there", "--gpus-per-node=; `srun nvidia-smi -L`; in a container --nv or --gpus all"),
    S("no such GPU number", "invalid device ordinal",
      "each rank sees fewer GPUs than it counts", "no --gpus-per-task or --gpu-bind; else device 0 in every rank"),
    # Slurm
    S("time limit", "DUE TO TIME LIMIT", "the job ran until its --time",
      "a longer --time; with --signal=USR2@120 a recipe saves before, and is queued again", whole_job=True),
    S("preemption", "DUE TO PREEMPTION", "a job of higher priority took the nodes",
      "if its job is not pending again, start it again on the same run_dir=; --requeue lets Slurm do so", whole_job=True),
    S("node failure", "Node failure on | DUE TO NODE FAILURE", "a node died or was cut off",
      "if its job is not pending again, start it again with --exclude= that node; report the node to the site"),
    S("job's memory is used up", "oom_kill event | oom-kill event | : Out Of Memory | OOM Killed | xceeded job memory limit | xceeded step memory limit"
      " | exceeded memory limit | is killed by signal: Killed",
      "Slurm or the kernel killed a process for its memory", "more --mem (--mem=0 is all of the node), or fewer num_workers="),
    S("step was not started", "ask launch for | Application launch failed | Job credential expired | execve(): ",
      "a node could not start its task", "is the program there on that node? else tell the site (clocks, munge), and --exclude= it"),
    S("requests of two allocations", "set by two different environment variables | SLURM_TRES_PER_TASK is mutually exclusive",
      "the shell has SLURM_* variables of another allocation, and srun (from Slurm 24.11 on) refuses both",
      "unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU, and give srun --cpus-per-task", whole_job=True),
    S("step does not fit", "Unable to create step", "srun asks for more than the job has",
      "compare srun's options with sbatch's; unset SLURM_* of another job", whole_job=True),
    S("job was refused", "Invalid account | Invalid qos | nvalid partition | Unable to allocate resources | job submission failed",
      "Slurm took no such job", "-A and -p as `sacctmgr show assoc user=$USER` and `sinfo -s` tell", whole_job=True),
    S("crash in native code", "Segmentation fault | SIGSEGV | task…: Bus error | Illegal instruction | SIGBUS",
      "a library crashed: often two that do not fit together, or /dev/shm", "PYTHONFAULTHANDLER=1 shows where; the same versions on all nodes"),
    S("killed from outside", "srun: error:…task…: Killed | : line…Killed | SIGKILL | exitcode: -9",
      "memory was used up, or srun ended the others", "sacct -j JOB -o state,maxrss,reqmem; dmesg on that host", SIGN),
    S("ended with the others", "srun: error:…task…: Terminated | srun: error:…task…: Aborted | Exited with exit code | CANCELLED AT"
      " |  SIGTERM | .SIGTERM | (SIGTERM | SIGABRT | ChildFailedError | SignalException | KeyboardInterrupt",
      "the launcher or scancel ended it", "look at the rank that is named first", CONSEQUENCE),
    # Data and file systems
    S("disk is full", "No space left on device", "the file system has no room, or no inodes", "`df -h` and `df -i` there; another run_dir=, stage_dir= or TMPDIR"),
    S("quota is used up", "Disk quota exceeded", "your quota there is used up", "`quota -s` or `lfs quota`; another run_dir=, or fewer keep_checkpoints="),
    S("file changed below it", "Stale file handle", "a file was replaced or removed on the server", "start again; who else writes there?"),
    S("file server is gone", "Transport endpoint is not connected | Cannot send after transport endpoint shutdown",
      "the mount of this node is lost", "--exclude= that host, and tell the site; run_dir= or data_dir= elsewhere"),
    S("disk cannot be read", "Input/output error", "the disk, or the file server behind it, fails", "dmesg on that host; --exclude= it; stage_dir= for data"),
    S("disk is read-only", "Read-only file system", "this mount takes no files", "another run_dir=, TMPDIR or TORCH_HOME"),
    S("too many open files", "Too many open files | received 0 items of ancdata",
      "the limit on open files is used up", "ulimit -n 65536 before srun; sharing strategy file_system; fewer loader processes"),
    S("permission denied", "Permission denied", "this user may not do that on this node", "`ls -ld` the path on that node, and the folders above it"),
    S("loader process is gone", "DataLoader worker (pid", "a loader process ended", "num_workers=0 shows its error; else memory: more --mem", SIGN),
    # Python and libraries
    S("module is missing", "ModuleNotFoundError | ImportError: cannot import name", "another environment is active on this node, or a package is missing",
      "activate it in the script, before srun; `srun which python`"),
    S("C or C++ library is too old", "version `GLIBC | version `CXXABI", "a library was built on a newer system",
      "conda's libstdc++ or a module's gcc first in LD_LIBRARY_PATH; or another build"),
    S("libraries do not fit", "undefined symbol:", "it was built against another version", "install torch and what is built on it together; look at LD_LIBRARY_PATH"),
    S("library is missing", "cannot open shared object file", "libcuda: no driver on this node; else a module is not loaded",
      "load the modules in the script; a GPU partition, or in a container --nv"),
    S("file is missing", "FileNotFoundError | No such file or directory:", "this node does not see it", "`srun ls` it: is the path on a shared file system?"),
    S("checkpoint does not fit", "Error(s) in loading state_dict | PytorchStreamReader failed | size mismatch for",
      "it is of another model, or damaged", "the keys it was made with, or resume= an older one"),
    # Training
    S("loss is not finite", " is nan: a lower lr | is inf: a lower lr | is -inf: a lower lr | loss nan | loss: nan | loss=nan | Loss: nan | Loss nan | Loss=nan"
      " | loss': nan | oss is nan | loss': tensor(nan",
      "the training has diverged", "a lower lr, a longer warm-up, clipped gradients; dtype=float32 to see; look at the data"),
    S("parameters without gradient", "Expected to have finished reduction in the prior iteration",
      "DDP waits for a gradient that this step did not make", "find_unused_parameters=True, or use all parameters in each step"),
)  # fmt: skip
EXCEPTION = Signature(
    "the program's own error", "Traceback (most recent call last)", "Python's traceback says where", "read it there", Level.error,
)  # fmt: skip
