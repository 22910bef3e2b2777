"""Why a run died, by its logs: the first rank and host to fail, and the known causes with their mends. Standard library only.

A signature is plain text with gaps and no regular expression, so that looking for all of them takes a time in proportion to
the logs, whatever is in those. Of a line that fits several signatures the first in the table holds.
"""

import contextlib
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core.errors import InputError, Kind
from recipes.core.files import read_json
from recipes.core.run import rundir

# cause: what began it. error: an exception that is in no table. sign: something is wrong, and it does not say what.
# consequence: what a rank says when another one is gone. harmless: looks like an error, and is none.
KINDS = ("cause", "error", "sign", "consequence", "harmless")

HEAD_BYTES, TAIL_BYTES = 2 << 20, 8 << 20  # of each file; what lies between is not read
MOST_FILES = 4096
MOST_NAMES = 200_000  # that a folder is looked through for logs
MOST_LINES = 10_000  # of one wording in one file
LONGEST_LINE = 2000  # characters of a line that is shown: a message of ours, with its fix, is shorter
WIDTH = 4096  # characters on either side of a find that are taken for its line
FAR = 100  # lines between two exceptions, after which the first one may have been caught
LATE_S = 60.0  # a cause that is stamped so long after the first consequence did not begin it
SUFFIXES = (".log", ".out", ".err", ".txt")
PRUNED = {"checkpoints", "node_modules", "__pycache__", rundir.EVALUATION}


@dataclass(frozen=True)
class Signature:
    """A known line. pattern: wordings with " | " between them, in which … stands for anything on the same line.

    means, mend: what it says, and what to do, a line each. kind: one of `KINDS`. whole: no single rank is to blame for it.
    """

    name: str
    pattern: str
    means: str
    mend: str
    kind: str = "cause"
    whole: bool = False


S, SIGN, CONSEQUENCE, HARMLESS = Signature, "sign", "consequence", "harmless"
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
      "a longer --time; with --signal=USR2@120 a recipe saves before, and is queued again", whole=True),
    S("preemption", "DUE TO PREEMPTION", "a job of higher priority took the nodes",
      "if its job is not pending again, start it again on the same run_dir=; --requeue lets Slurm do so", whole=True),
    S("node failure", "Node failure on | DUE TO NODE FAILURE", "a node died or was cut off",
      "if its job is not pending again, start it again with --exclude= that node; report the node to the site"),
    S("job's memory is used up", "oom_kill event | oom-kill event | : Out Of Memory | OOM Killed | xceeded job memory limit | xceeded step memory limit"
      " | exceeded memory limit | is killed by signal: Killed",
      "Slurm or the kernel killed a process for its memory", "more --mem (--mem=0 is all of the node), or fewer num_workers="),
    S("step was not started", "ask launch for | Application launch failed | Job credential expired | execve(): ",
      "a node could not start its task", "is the program there on that node? else tell the site (clocks, munge), and --exclude= it"),
    S("requests of two allocations", "set by two different environment variables | SLURM_TRES_PER_TASK is mutually exclusive",
      "the shell has SLURM_* variables of another allocation, and srun (from Slurm 24.11 on) refuses both",
      "unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU, and give srun --cpus-per-task", whole=True),
    S("step does not fit", "Unable to create step", "srun asks for more than the job has",
      "compare srun's options with sbatch's; unset SLURM_* of another job", whole=True),
    S("job was refused", "Invalid account | Invalid qos | nvalid partition | Unable to allocate resources | job submission failed",
      "Slurm took no such job", "-A and -p as `sacctmgr show assoc user=$USER` and `sinfo -s` tell", whole=True),
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
PATTERNS = {signature.name: signature.pattern for signature in SIGNATURES}
# Last lines of ours after which a rank's own error, found in a log, says more.
HIDING = {"a rank lost its peers": Kind.peer_lost, "a rank that left no error record": Kind.killed}
EXCEPTION = Signature(
    "the program's own error", "Traceback (most recent call last)", "Python's traceback says where", "read it there", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A signature that the logs hold. count: of ranks, or of files where no rank is named. where: file and line."""

    signature: Signature
    count: int
    of: str
    line: str
    where: str


@dataclass(frozen=True)
class Explanation:
    """What the logs say. verdict: a line. rank, host: the first to fail, None where nothing tells. error: the line that shows it,
    or "", and where it stands. causes: what began it first, harmless ones last. notes: what could not be read."""

    verdict: str
    rank: int | None = None
    host: str | None = None
    error: str = ""
    where: str = ""
    causes: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What is printed: the verdict, then at most four causes with their mends, then the rest by name; twenty lines at most."""
        said = [self.verdict]
        if self.error:
            said.append(f"  {self.where}: {self.error}")
        by_weight = (KINDS[:2], KINDS[2:3], KINDS[3:4])  # where there is a cause, what only hints at one is named below
        graded = [[found for found in self.causes if found.signature.kind in kinds] for kinds in by_weight]
        chosen = next((some[:4] for some in graded if some), [])
        for found in chosen:
            signature = found.signature
            said += [f"{signature.kind}: {_counted(found)}: {signature.means}", f"  do: {signature.mend}"]
            if (found.where, found.line) != (self.where, self.error):
                said.append(f"  {found.where}: {found.line}")
        for title, kinds in (("besides", KINDS[:3]), ("followed", KINDS[3:4]), ("harmless", KINDS[4:])):
            rest = [found for found in self.causes if found.signature.kind in kinds and found not in chosen]
            if rest:
                more = f", and {len(rest) - 6} more" if len(rest) > 6 else ""
                said.append(f"{title}: {', '.join(map(_counted, rest[:6]))}{more}")
        return [shown(line) for line in said + list(self.notes[:3])]


@dataclass(frozen=True)
class Own:
    """What a run's own records say: the verdict in a line, "" for none; the first rank to fail, its host, and why."""

    verdict: str = ""
    rank: int | None = None
    host: str | None = None
    kind: Kind | None = None


@dataclass
class _Event:
    """A line that fits a signature. when: seconds, by its own time (stamped) or by that of a line above it.

    mild: a logger's level calls it a warning, or less.
    """

    signature: Signature
    path: str
    where: str
    line: str
    order: tuple[int, int]
    rank: int | None
    host: str | None
    process: tuple[str, str] | None
    when: float | None
    stamped: bool
    mild: bool


NOTHING = Own()


def explain(
    folder: Path, own: Own = NOTHING, batch_logs: Sequence[Path] = (), notes: tuple[str, ...] = ()
) -> Explanation:
    """Reads the logs of a failed run: a run directory of ours, any folder of logs, or one file. Runs nothing, changes nothing.

    own: what a run's own records say. batch_logs: files of its job, outside of the folder. notes: to be shown first of all notes.
    Raises InputError, with one line, for a path that is not there or holds no log.
    """
    folder = Path(folder)
    try:
        single = not stat.S_ISDIR(folder.stat().st_mode)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            shown(f"{folder}: cannot be read ({why}): give a run directory, or a folder or file of logs")
        ) from None
    files, left_out = ([folder], "") if single else _files(folder)
    told = _Told(hosts=_hosts_of(folder) if not single else {})
    roots = {path.parent.parent for path in files if re.fullmatch(r"(stdout|stderr)\.log", path.name)}
    for number, path in enumerate(files):
        name = path.name if single else str(path.relative_to(folder))
        told.read(number, path, shown(name, 120), _rank_in_name(name, len(roots) == 1))
    for number, path in enumerate(batch_logs, len(files)):
        name = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
        rank = _rank_in_name(path.name, False)
        told.read(number, path, shown(name), rank or None)  # rank 0's is the batch script's too
    if not told.files and not own.verdict:
        why = told.unread[0] if told.unread else f"holds no log ({', '.join('*' + suffix for suffix in SUFFIXES)})"
        raise InputError(shown(f"{folder}: {why}: give a run directory, or a folder or file of logs"))
    said = [*notes, left_out] if left_out else [*notes]
    if not single and isinstance(attempt := small_json(folder / "attempt.json").get("attempt"), int) and attempt > 0:
        said.append(
            f"the ranks' logs hold {attempt} earlier attempt{'s' if attempt > 1 else ''} too: a cause may be an old one"
        )
    if told.unread:
        said.append(f"not read: {told.unread[0]}" + (f", and {len(told.unread) - 1} more" if told.unread[1:] else ""))
    return _judge(told, own if own.verdict else told.recap, tuple(said))


def _judge(told: "_Told", own: Own, notes: tuple[str, ...]) -> Explanation:
    """Puts together what the files say. own: our own verdict, where a run of ours has left one."""
    events = told.settled()
    first = events[0] if events and events[0].signature.kind != HARMLESS else None
    rank, host, verdict = None, None, ""
    if first and not first.signature.whole:
        named = [e for e in events if e.signature is first.signature and (e.rank is not None or e.host)]
        first = first if first.rank is not None or first.host or not named else named[0]
        rank, host = first.rank, first.host
    grave = first is not None and first.signature.kind in KINDS[:2] and rank is not None
    if own.verdict and not (grave and own.kind in (Kind.peer_lost, Kind.killed)):
        verdict, rank, host = own.verdict, own.rank, own.host
        if rank is not None:
            first = next((e for e in events if e.rank == rank and e.signature.kind != HARMLESS), None)
    elif first is None:
        last = f"; the last words, in {told.last[0]}: {told.last[1]}" if told.last[1] else ": they are empty"
        verdict = f"no known cause in {told.files} file{'s' if told.files != 1 else ''}{last}"
    elif first.signature.whole:
        verdict = f"the whole job was ended, and no rank is to blame: {first.signature.name}"
    elif first.signature.kind == CONSEQUENCE and (missed := _missed(events, told.ranks())) is not None:
        rank, why = missed
        host, verdict = told.hosts.get(rank), why
    elif first.signature.kind == CONSEQUENCE:
        verdict = f"{_who(rank, host) or 'a rank'} spoke first, of a consequence ({first.signature.name}); what began it left no line here"
    else:
        who, name = _who(rank, host), first.signature.name
        verdict = f"{who} failed first: {name}" if who else f"first came, on a rank that the logs do not name: {name}"
    error, where = (first.line, first.where) if first else ("", "")
    if own.verdict and not own.kind and not first:  # a run that never began
        where, error = told.last
    if first and first.order in told.later:
        notes = (told.later[first.order], *notes)
    if rank is not None and host and f"rank {rank} on" not in verdict and f"rank {rank}" in verdict:
        verdict = verdict.replace(f"rank {rank}", f"rank {rank} on {host}", 1)
    return Explanation(shown(verdict), rank, host, error, where, tuple(_grouped(events)), notes)


def _missed(events: list[_Event], known: set[int]) -> tuple[int, str] | None:
    """Where all that is said are consequences: the rank that was behind the others, or the only one that said nothing."""
    behind: dict[int, int] = {}
    for event in events:
        number = re.search(r"SeqNum=(\d{1,18}),", event.line)
        if number and event.rank is not None:
            behind[event.rank] = min(int(number[1]), behind.get(event.rank, 1 << 62))
    least = min(behind.values(), default=0)
    last = sorted(rank for rank, number in behind.items() if number == least)
    if last and 2 * len(last) < len(behind):
        most = max(behind.values())
        return last[0], f"rank {last[0]} was behind: it waited in collective {least}, the others in {most}"
    silent = known - {event.rank for event in events if event.rank is not None and event.signature.kind != HARMLESS}
    if len(silent) == 1 and len(known) > 2:
        rank = silent.pop()
        return rank, f"rank {rank} said nothing, while all others lost a rank or waited: look at it first"
    return None


def _grouped(events: list[_Event]) -> Iterator[Found]:
    """Each signature once, in the order of its first event."""
    by_name: dict[str, list[_Event]] = {}
    for event in events:
        by_name.setdefault(event.signature.name, []).append(event)
    for group in by_name.values():
        ranks, files = {e.rank for e in group if e.rank is not None}, {e.path for e in group}
        of = "rank" if ranks else "file"
        yield Found(group[0].signature, len(ranks) or len(files), of, group[0].line, group[0].where)


class _Told:
    """What the files tell, read one after another."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self.events: list[_Event] = []
        self.hosts = dict(hosts)  # by rank
        self.rank_of: dict[tuple[str, str], int] = {}  # by host and process id, from NCCL's own lines
        self.named: set[int] = set()  # ranks that have a file
        self.files, self.unread, self.last = 0, list[str](), ("", "")
        self.recap = NOTHING
        self.later: dict[tuple[int, int], str] = {}  # by the order of an exception, another one far below it

    def read(self, number: int, path: Path, name: str, rank: int | None) -> None:
        """Adds a file's events. rank: whose file it is, by its name."""
        try:
            pieces = _pieces(path)
        except (OSError, ValueError) as error:
            self.unread.append(f"{name} ({getattr(error, 'strerror', None) or error})")
            return
        self.files += 1
        self.named |= {rank} if rank is not None else set()
        for at, (text, from_start) in enumerate(pieces):
            begin = _last_attempt(text)
            labelled, total = _labelled(text), text.count("\n") + (not text.endswith("\n"))
            self._notice(text, begin)
            lines, counted = 1, 0
            first_of: dict[tuple[object, ...], _Event] = {}
            last_of: dict[tuple[object, ...], tuple[int, int]] = {}
            for start, (end, signature, offset) in sorted(_scan(text, begin).items()):
                said, host, process = _speaker(text[start : min(end, start + 500)], labelled)
                said = said if said is not None else self.rank_of.get(process or ("", ""), rank)
                mild = _MILD.search(text, start, start + offset) is not None
                last_of[key := (signature.name, said, host, mild)] = (start, end)
                if key in first_of:
                    continue
                lines, counted = lines + text.count("\n", counted, start), start
                where = f"{name}:{lines}" if from_start else f"{name}, line {total - lines + 1} from its end"
                line = (
                    text[start:end].strip()
                    if offset < 150
                    else f"{text[start : start + 60]} … {text[start + offset - 20 : end]}"
                )
                own = _when(text[start : min(end, start + 500)], first=True)
                when = own if own is not None else _when(text[max(0, start - 2 * WIDTH) : start], first=False)
                order = (number, start + at * HEAD_BYTES)
                first_of[key] = _Event(
                    signature, name, where, shown(line), order, said, host, process, when, own is not None, mild
                )
            self.events += first_of.values()
            for one, first in first_of.items():
                if first.signature is not EXCEPTION:
                    continue
                start, end = last_of[one]
                between = text.count("\n", first.order[1] - at * HEAD_BYTES, start)
                if between >= FAR:
                    line = shown(text[start:end].strip())
                    self.later[first.order] = f"{name} goes on after that, until, {between} lines below: {line}"
        if pieces and (words := _last_line(pieces[-1][0])):
            self.last = (name, words)

    def _notice(self, text: str, begin: int) -> None:
        """NCCL's process ids by rank, and our own last line where it names a rank."""
        for start, end in _lines_with(text, " nranks ", 0):
            line = text[start : min(end, start + 500)]
            if (prefix := _NCCL.match(line)) and (rank := re.search(r"\brank (\d{1,6}) nranks ", line)):
                self.rank_of[(prefix[1], prefix[2])] = int(rank[1])
                self.hosts.setdefault(int(rank[1]), prefix[1])
        for start, end in _lines_with(text, "failed: rank ", begin):
            if found := _RECAP.fullmatch(text[start : min(end, start + WIDTH)]):
                # A log has words alone; the table's own wordings tell which of them hide a cause.
                hides = {name: any(w in found[1] for w in PATTERNS[name].split(" | ")) for name in HIDING}
                kind = next((HIDING[name] for name in HIDING if hides[name]), None)
                self.recap = Own(found[1], int(found[2]), found[3], kind)

    def ranks(self) -> set[int]:
        """All ranks that are known to have been there."""
        seen = {event.rank for event in self.events if event.rank is not None} | self.named | set(self.hosts)
        return set(range(max(seen) + 1)) if seen and max(seen) < MOST_FILES else seen

    def settled(self) -> list[_Event]:
        """The events, what began it first: by kind, then by time, then as they stand in the files."""
        for event in self.events:
            if event.rank is None and event.process:
                event.rank = self.rank_of.get(event.process)
            if event.rank is not None and event.host:
                self.hosts.setdefault(event.rank, event.host)
        for event in self.events:
            event.host = event.host or (self.hosts.get(event.rank) if event.rank is not None else None)
        stamps = [e.when for e in self.events if e.stamped and e.when is not None and e.signature.kind == CONSEQUENCE]
        late = min(stamps, default=math.inf) + LATE_S

        def key(event: _Event) -> tuple[float, float, tuple[int, int]]:
            level, when = float(KINDS.index(event.signature.kind)), math.inf if event.when is None else event.when
            if event.signature.whole:
                level += 0.5  # a job that hangs after a rank's failure ends so, too
            if event.mild:
                level = max(level, 2.5)
            return max(level, 3.0) if event.stamped and when > late else level, when, event.order

        return sorted(self.events, key=key)


# --- files


def _files(folder: Path) -> tuple[list[Path], str]:
    """The logs in a folder, of the newest job where it holds several, and what is left out. Links to folders are not followed."""
    found: list[Path] = []
    looked_at = 0
    for place, folders, names in os.walk(folder):
        looked_at += len(folders) + len(names)
        folders[:] = sorted(f for f in folders if f not in PRUNED and not f.startswith("."))
        found += [Path(place, n) for n in sorted(names) if n.endswith(SUFFIXES) or re.search(r"\.[oe]\d{1,12}$", n)]
        if len(found) > MOST_FILES or looked_at > MOST_NAMES:
            return found[
                :MOST_FILES
            ], f"there are more than {MOST_FILES:,} logs or {MOST_NAMES:,} files; not all were read"
    found.sort(key=lambda path: [p.zfill(12) if p.isdecimal() else p for p in re.split(r"(\d+)", str(path))])
    jobs = {path: job[1] or job[2] for path in found if (job := _JOB.search(path.name))}
    if len(set(jobs.values())) < 2:
        return found, ""
    newest = jobs[max(jobs, key=lambda path: os.lstat(path).st_mtime)]
    found = [path for path in found if jobs.get(path, newest) == newest]
    return found, f"read: the logs of job {newest}, the newest here"


def _pieces(path: Path) -> list[tuple[str, bool]]:
    """The text of an ordinary file, or its first and last part; and whether a part begins where the file does. Raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "not an ordinary file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a pipe since
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not an ordinary file")
        size = os.fstat(descriptor).st_size
        parts = [(file.read(HEAD_BYTES + TAIL_BYTES if size <= HEAD_BYTES + TAIL_BYTES else HEAD_BYTES), True)]
        if size > HEAD_BYTES + TAIL_BYTES:
            file.seek(size - TAIL_BYTES)
            parts.append((file.read(TAIL_BYTES), False))
    # Without colours; they would stand between the words.
    return [(_COLOUR.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n"), whole) for data, whole in parts]


def _rank_in_name(name: str, one_node: bool) -> int | None:
    """Whose file it is: rank3.log here, 17_3_log.out of submitit, attempt_0/3/stderr.log of torchrun on one node."""
    found = re.search(r"(?:^|[^a-z])(?:rank|task)[_.-]?(\d{1,6})(?=\D|$)[^/]*$|_(\d{1,6})_log\.(?:out|err)$", name)
    local = re.search(r"(?:^|/)(\d{1,4})/std(?:out|err)\.log$", name) if one_node else None
    return int(found[1] or found[2]) if found else int(local[1]) if local else None


def small_json(path: Path) -> dict[str, Any]:
    """A small JSON object in an ordinary file; else an empty one."""
    with contextlib.suppress(OSError, RecursionError):
        if stat.S_ISREG((status := path.stat()).st_mode) and status.st_size < HEAD_BYTES:
            return read_json(path) or {}
    return {}


def _hosts_of(folder: Path) -> dict[int, str]:
    hosts = small_json(folder / "attempt.json").get("hosts")
    return {rank: host for rank, host in enumerate(hosts) if isinstance(host, str)} if isinstance(hosts, list) else {}


# --- lines

_JOB = re.compile(r"^(\d+(?:_\d+)?)_\d+_log\.(?:out|err)$|^.*-(\d+(?:_\d+)?)\.(?:out|err)$")
_INTRODUCED = re.compile(r"(?:^|\n)\w{1,64}: \d{1,6} ranks? on \d{1,6} nodes?, [^\n]*$")
_MILD = re.compile(r"(?<!NCCL)(?:^|[\s\[(|])(?:WARNING|INFO|DEBUG)(?=[\s\]):|,-])", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_RANK = re.compile(
    r"\[rank(\d{1,6})\]|\b[Rr]ank (\d{1,6})\]|\brank (\d{1,6}) on ([\w.-]{1,255})|srun: error: ([\w.-]{1,255}): tasks? (\d{1,6})"
)
_NCCL = re.compile(r"(?:\[[^\]\n]{1,40}\]:? ?|\s{0,8}\d{1,6}: ?)?([\w.-]{1,255}):(\d{1,10}):\d{1,10} \[\d{1,3}\] ")
_NODE = re.compile(r"Node failure on ([\w.-]{1,255})|failed on node ([\w.-]{1,255})")
_RECAP = re.compile(r"(?:\w{1,64}: )?failed: (rank (\d{1,6}) on ([\w.-]{1,255}) .{1,1500}?)(?:; logs in .*)?")
_STAMP = re.compile(
    r"\b[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d(?:\.\d{1,9})?)|\b(?:\d{4}[-/])?(\d\d)[-/](\d\d)[T_ ](\d\d):(\d\d):(\d\d(?:[.,]\d{1,9})?)"
)


def _lines_with(text: str, wording: str, begin: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each line that holds ``wording``; of a very long one, what is near it. A carriage return ends a line too."""
    at = text.find(wording, begin)
    for _ in range(MOST_LINES):
        if at < 0:
            return
        low, high = max(begin, at - WIDTH), at + WIDTH
        start = max(text.rfind("\n", low, at), text.rfind("\r", low, at), low - 1) + 1
        end = min([e for c in "\n\r" if (e := text.find(c, at, high)) >= 0], default=min(high, len(text)))
        yield start, end
        at = text.find(wording, end)


def _scan(text: str, begin: int) -> dict[int, tuple[int, Signature, int]]:
    """The lines from ``begin`` on that fit: their ends, their signatures, and where in them it fits, by where they begin."""
    found: dict[int, tuple[int, Signature, int]] = {}
    for signature in SIGNATURES:
        for wording in signature.pattern.split(" | "):
            parts = wording.split("…")
            for start, end in _lines_with(text, parts[0], begin):
                at = offset = text.find(parts[0], start, end)
                for part in parts[1:]:
                    at = text.find(part, at, end) if at >= 0 else at
                if at >= 0 and start not in found:
                    found[start] = (end, signature, offset - start)
    for start, end in _lines_with(text, EXCEPTION.pattern, begin):
        where = _exception(text, start, end)
        if where and where[0] not in found:
            found[where[0]] = (where[1], EXCEPTION, 0)
    return found


def _exception(text: str, start: int, end: int) -> tuple[int, int] | None:
    """The line that ends a traceback: the first one that is not indented, behind the same ``[rank3]:`` or ``3:``, if there is one."""
    prefix = re.match(r"(?:\[\w{1,20}\]:|\s{0,8}\d{1,6}:) ?", text[start:end])
    label, at = prefix[0] if prefix else "", end + 1
    for _ in range(400):
        stop = text.find("\n", at, at + WIDTH)
        line = text[at : stop if stop >= 0 else at + WIDTH]
        if line.startswith(label):
            bare = line[len(label) :]
            if bare and not bare[0].isspace():
                return (at, at + len(line)) if re.match(r"[A-Za-z_][\w.]{0,200}(?::|\s*$)", bare) else None
        at += len(line) + 1
    return None


def _speaker(head: str, labelled: bool) -> tuple[int | None, str | None, tuple[str, str] | None]:
    """Whose line it is, as far as its begin tells: rank, host, and NCCL's host and process."""
    rank, host, process = None, None, None
    if found := _RANK.search(head):
        rank, host = int(found[1] or found[2] or found[3] or found[6]), found[4] or found[5]
    elif labelled and (label := re.match(r"\s{0,8}(\d{1,6}): ", head)):
        rank = int(label[1])
    if nccl := _NCCL.match(head):
        host, process = nccl[1], (nccl[1], nccl[2])
    if node := _NODE.search(head):
        host = node[1] or node[2]
    return rank, host, process


def _when(text: str, first: bool) -> float | None:
    """The first or last time in a text, as seconds since the year began, in months of 31 days; years and zones are left out."""
    last = None
    for found in _STAMP.finditer(text):
        month, day, hour, minute, second = found.groups()[:5] if found[1] else found.groups()[5:]
        if 1 <= int(month) <= 12:
            minutes = ((int(month) * 31 + int(day)) * 24 + int(hour)) * 60 + int(minute)
            last = minutes * 60 + float(second.replace(",", "."))
            if first:
                return last
    return last


def _last_attempt(text: str) -> int:
    """Where the last attempt of a run of ours begins, where several have appended to one file."""
    at = max(text.rfind("\nrun directory: "), 0)
    return at if _INTRODUCED.search(text[max(0, at - WIDTH) : at]) else 0


def _labelled(text: str) -> bool:
    """Whether the lines begin with their ranks, as ``srun --label`` writes them."""
    lines = [line for line in text[: 4 * WIDTH].split("\n")[:50] if line]
    return len(lines) > 4 and all(re.match(r"\s{0,8}\d{1,6}: ?", line) for line in lines[:-1])


def _last_line(text: str) -> str:
    words = text[-WIDTH:].split()
    return shown(re.split(r"[\n\r]", text[-WIDTH:].rstrip())[-1].strip()) if words else ""


def _who(rank: int | None, host: str | None) -> str:
    return f"rank {rank} on {host}" if rank is not None and host else f"rank {rank}" if rank is not None else host or ""


def _counted(found: Found) -> str:
    return f"{found.signature.name} ({found.count} {found.of}{'s' if found.count != 1 else ''})"


def shown(text: str, limit: int = LONGEST_LINE) -> str:
    """A text for a terminal: one line, cut where it is very long, its control characters escaped."""
    text = text.rstrip()[: limit + 1]
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
