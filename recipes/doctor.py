"""The doctor: is this allocation healthy, which node is bad, which interface do the ranks take; and, afterwards, why did it die?

    srun --ntasks-per-node=1 --gpus-per-node=8 python -m recipes.doctor      # every node of an allocation; status 0 or 3
    python -m recipes.doctor                                                 # this machine alone, a login node too
    python launch.py recipe=imagenet nodes=4 gpus_per_node=8 doctor=true data_dir=/data   # at the head of a job
    python -m recipes.doctor explain runs/imagenet/1234                      # why a run ended; of a folder of runs, each
    python -m recipes.doctor env my.env                                      # what is wrong in an env file
    python -m recipes.doctor network                                         # lines for an env file of one's own

What to expect: ten seconds on two nodes of two cores; with GPUs not measured. The nodes meet through files in run_dir, since a
broken network is what is looked for. Nothing here imports torch: what needs it, or can hang, is a process of its own, and the whole
is over after ``seconds=120``.
"""

import contextlib
import gc
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from recipes.conf.doctor import Config
from recipes.core import errors
from recipes.core.config import envfile, help, profiles
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import Device
from recipes.core.doctor import examine, explain, reach, variables, verdict
from recipes.core.errors import ConfigError, Kind
from recipes.core.files import ROOT, read_json, write_json
from recipes.core.place import network, ranks
from recipes.core.place.findings import Finding
from recipes.core.place.ranks import RankInfo
from recipes.core.run import command_line, rundir, source
from recipes.core.run.scontrol import Queue

# Shares of ``seconds`` at which a part is given up.
LOCAL, REACH, GO, LINKS, VERDICT = 0.4, 0.55, 0.6, 0.85, 0.92
POLL_S = 0.3
OVER_S = 5.0  # after the whole, for whatever hangs in this process itself
LEAVE_S = 3.0  # for the others to leave before the rank that gave the verdict
STALE_S = 300.0  # a word that is older than this rank by more is of an earlier examination
NAMED = "examination.json"  # has its name, however old


class Meeting:
    """The folder in which the nodes leave word for each other; a word is a whole file of JSON.

    An examination that was ended before its verdict has left its words there. So the first rank gives this one a name, under which
    each word stands; who has spoken before there was one says all of it again. Who comes before the first rank may still find an
    older name: it acts on the first rank's word alone that has its ``token`` in it.
    """

    def __init__(self, folder: Path, first: bool) -> None:
        self.folder, self._is_first = folder, first
        self._told: dict[str, Mapping[str, Any]] = {}
        self.is_heard = False  # by the first rank, for sure
        self.token = secrets.token_hex(8)  # this rank's
        self.tokens: dict[str, str] = {}  # of who has told what was found here, by the words' names
        self._name = secrets.token_hex(8) if first else ""
        folder.mkdir(parents=True, exist_ok=True)
        # By the file system's clock, as the words are: this node's own may be off.
        with tempfile.TemporaryFile(dir=folder) as file:
            self._begin = os.fstat(file.fileno()).st_mtime
        if first:
            write_json(folder / NAMED, {"name": self._name})

    def tell(self, name: str, content: Mapping[str, Any]) -> None:
        self._told[name] = content
        self._learn_name()
        self._write(name)

    def wait(self, names: Sequence[str], end: float) -> dict[str, dict[str, Any]]:
        """What is there of ``names``, as soon as all is, or at ``end`` (time.monotonic)."""
        found: dict[str, dict[str, Any]] = {}
        while True:
            if self._learn_name():
                found = {}
            with contextlib.suppress(FileNotFoundError):  # who comes late finds it swept
                there = set(os.listdir(self.folder))  # once, and it makes NFS look again
                wanted = [name for name in names if name not in found and f"{name}.json" in there]
                found |= {name: word for name in wanted if (word := self._word(name))}
            if len(found) == len(names) or time.monotonic() > end:
                return found
            time.sleep(POLL_S)

    @property
    def name(self) -> str:
        """Of the examination, as far as it is known."""
        return self._name

    def _learn_name(self) -> bool:
        """Whether the first rank has named this examination since; then what was told is told again."""
        name = None if self._is_first else (read_json(self.folder / NAMED) or {}).get("name")
        if not name or name == self._name:
            return False
        self._name = str(name)
        for told in self._told:
            self._write(told)
        return True

    def _write(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{name}.json", {"of": self._name, "by": self.token, "says": self._told[name]})

    def _word(self, name: str) -> dict[str, Any] | None:
        """What was told in this examination; one's own without a look at the file, which another one may have written over."""
        word = {"of": self._name, "by": self.token, "says": self._told[name]} if name in self._told else {}
        word = word or self._read(f"{name}.json") or {}
        says = word.get("says") if word.get("of") == self._name else None
        self.tokens[name] = str(word.get("by"))
        return dict(says) if isinstance(says, dict) else None

    def _read(self, file: str) -> dict[str, Any] | None:
        """A file's content, unless it is older than any that is of this examination."""
        path = self.folder / file
        with contextlib.suppress(OSError):
            if path.stat().st_mtime > self._begin - STALE_S:
                return read_json(path)
        return None

    def is_new(self, name: str) -> bool:
        """Whether a word was told since this rank began."""
        with contextlib.suppress(OSError):
            return (self.folder / f"{name}.json").stat().st_mtime >= self._begin
        return False

    def withdraw(self) -> None:
        """Takes one's own words back, in an examination that is given up; not those of another one that has come since."""
        mine = {f"{name}.json": ("by", self.token) for name in self._told} | {
            NAMED: ("name", self._name if self._is_first else "")
        }
        for file, (key, value) in mine.items():
            with contextlib.suppress(OSError):
                if (read_json(self.folder / file) or {}).get(key) == value:
                    (self.folder / file).unlink()

    def sweep(self) -> None:
        """Leaves nothing for the next examination to find."""
        shutil.rmtree(self.folder, ignore_errors=True)


def examine_all(settings: Settings, info: RankInfo, leaving: list[Callable[[], None]]) -> int:
    """This rank's part of the examination, in bounded time. Gives its exit status: 3 where the first rank finds a bad node.

    leaving: gets what is to be done where this process is told to end.
    """
    cfg: Config = settings.config
    begin = time.monotonic()

    def at(share: float) -> float:
        return begin + share * cfg.seconds

    run_dir = rundir.for_examination(
        rundir.choose(settings.run.run_dir, "doctor", info.run_id or _group_name(info), ROOT)
    )
    # A job's steps come one after another, and each is an examination of its own.
    meeting = Meeting(run_dir / "reports" / f"{info.run_id or 'now'}-{info.restart_count}", info.rank == 0)
    leaving.append(meeting.withdraw)
    nonce = meeting.folder.as_posix()
    server = reach.Server(info.node_rank, nonce)
    here = examine.Surroundings(os.environ, info, run_dir, _data_dir(cfg), settings.run.device is Device.cpu)
    taken: list[Finding] = []
    if info.local_rank == 0:
        word, taken = _listen(server, info)
        meeting.tell(f"port-{info.node_rank}", word)
    report = examine.everything(here, LOCAL * cfg.seconds)
    report.findings += taken
    asked_in = meeting.name
    if info.local_rank == 0:
        report.links = _ask_peers(meeting, info, nonce, at(REACH), 0.05 * cfg.seconds)
    meeting.tell(f"report-{info.rank}", report.as_json())
    if info.rank == 0:
        with _free_port() as listener:
            meeting.tell("go", _members(meeting, info, cfg, listener.getsockname()[1], at(GO)))
            group = _measure(meeting, info, settings, listener.fileno(), at(GO), at(LINKS))
    else:
        group = _measure(meeting, info, settings, -1, at(GO) + 3, at(LINKS))
    # Before the first rank had begun, who was asked may have been another examination's, and gone.
    if info.local_rank == 0 and meeting.name != asked_in:
        report.links = _ask_peers(meeting, info, nonce, at(LINKS), 0.02 * cfg.seconds)
    meeting.tell(f"final-{info.rank}", {**report.as_json(), "bandwidth": group})
    if info.rank == 0:
        code = _judge(meeting, info, cfg, run_dir, at(VERDICT))
    else:
        code = _stand_by(meeting, info, cfg, run_dir, at(VERDICT) + 3, at(1))
    server.close()
    return code


def _group_name(info: RankInfo) -> str | None:
    """A folder that all ranks know by themselves, where no scheduler names the job."""
    one_machine = os.environ.get("RECIPES_LAUNCH", "") if info.num_nodes == 1 else ""  # another on each
    run = os.environ.get("TORCHELASTIC_RUN_ID") or one_machine
    return f"{info.master_addr}-{info.master_port}-{run}".strip("-").replace("/", "_") if info.world_size > 1 else None


def _data_dir(cfg: Config) -> str:
    return cfg.data_dir or os.environ.get("RECIPES_DATA", "")


def _listen(server: reach.Server, info: RankInfo) -> tuple[dict[str, Any], list[Finding]]:
    """Where this node listens for the others; on the first node also on the port that the ranks would meet at, if it is free."""
    word: dict[str, Any] = {"port": server.listen(), "host": socket.gethostname(), "master": False}
    if not info.nodes and (choice := _interface(info)):
        word["host"] = choice.address  # by hand no node knows another's name
    if info.rank != 0 or info.num_nodes == 1 or not info.master_port or "TORCHELASTIC_RUN_ID" in os.environ:
        return word, []
    try:
        server.listen(info.master_port, int(os.environ.get("RECIPES_LISTEN_FD", -1)))  # launch.py listens there already
        word["master"] = True
    except OSError as error:
        who = reach.who_listens(info.master_port)
        why = os.strerror(error.errno) if error.errno else str(error)
        what = f"port {info.master_port}, at which the ranks meet, cannot be listened on ({why}{f': {who}' if who else ''})"
        return word, [Finding(what, "set MASTER_PORT to a free one for all ranks, or end what listens there")]
    return word, []


def _interface(info: RankInfo) -> network.Choice | None:
    with contextlib.suppress(network.NetworkError):
        return network.choose(info)
    return None


def _ask_peers(meeting: Meeting, info: RankInfo, nonce: str, end: float, timeout_s: float) -> list[dict[str, Any]]:
    """The ways to a few other nodes, as `reach.peers` chooses them."""
    wanted = reach.peers(info.node_rank, info.num_nodes)
    ports = meeting.wait([f"port-{peer}" for peer in wanted], end - 4 * timeout_s)

    def ask(peer: int) -> reach.Link:
        word = ports.get(f"port-{peer}")
        host = info.master_addr if peer == 0 else info.nodes[peer] if info.nodes else str((word or {}).get("host", ""))
        if not word or not isinstance(word.get("port"), int):
            return reach.Link(peer, host, fault="silent", why="no word in the run directory")
        return reach.probe(
            peer, host, word["port"], nonce, timeout_s, info.master_port if word.get("master") is True else 0
        )

    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        return [link.as_json() for link in pool.map(ask, wanted)]


@contextlib.contextmanager
def _free_port() -> Iterator[socket.socket]:
    listener = reach.listener(0)
    try:
        yield listener
    finally:
        listener.close()


def _members(meeting: Meeting, info: RankInfo, cfg: Config, port: int, end: float) -> dict[str, Any]:
    """Rank 0's: who measures bandwidth: all ranks whose nodes answered and are not bad, if rank 0's is one of them."""
    names = [f"report-{rank}" for rank in range(info.world_size)]
    found = meeting.wait(names, end)
    bad = {
        node for entry in verdict.judge(_expected(info), found.values()).entries if entry.bad for node in entry.nodes
    }
    members = {
        rank: int(found[name]["node_rank"])
        for rank, name in enumerate(names)
        if name in found and _sound(found[name], bad)
    }
    if not cfg.bandwidth or len(members) < 2 or 0 not in members:
        members = {}
    backend = "nccl" if all(map(_has_a_gpu_a_rank, (found[f"report-{rank}"] for rank in members))) else "gloo"
    heard = {str(rank): meeting.tokens[name] for rank, name in enumerate(names) if name in found}
    return {"ranks": list(members), "nodes": list(members.values()), "port": port, "backend": backend, "heard": heard}


def _has_a_gpu_a_rank(report: Mapping[str, Any]) -> bool:
    """Whether a node's first rank has seen as many GPUs as there are ranks; True of its other ranks, which do not say."""
    facts = report["facts"].get("gpus") or {}
    seen = facts.get("gpus")
    ranks_there = facts.get("ranks", 0)
    if report.get("local_rank") and not seen:
        return True
    return isinstance(seen, list) and (
        len(seen) >= ranks_there or (len(seen) == 1 and facts.get("granted", 0) >= ranks_there)
    )


def _sound(report: Mapping[str, Any], bad: set[int]) -> bool:
    return (
        isinstance(report.get("node_rank"), int)
        and isinstance(report.get("facts"), dict)
        and report["node_rank"] not in bad
    )


def _go(meeting: Meeting, info: RankInfo, end: float) -> dict[str, Any]:
    """The first rank's word on who measures, if it has heard this rank; {} where none comes until ``end``."""
    while True:
        go = meeting.wait(["go"], end).get("go")
        if go and go["heard"].get(str(info.rank)) == meeting.token:
            meeting.is_heard = True
            return go
        if time.monotonic() > end or (go and meeting.is_new("go")):  # which does without this rank
            return {}
        time.sleep(POLL_S)  # that may be another examination's


def _measure(
    meeting: Meeting, info: RankInfo, settings: Settings, listener: int, go_end: float, end: float
) -> dict[str, Any]:
    """This rank's part of the bandwidth test, in a process that is killed at ``end``; how far it came, and what it found."""
    go = _go(meeting, info, go_end)
    ranks_, nodes = go.get("ranks", []), go.get("nodes", [])
    if info.rank not in ranks_:
        return {}
    environ = dict(os.environ)
    if choice := _interface(info):
        environ.update(network.settings(choice, environ))
    local = [rank for rank, node in zip(ranks_, nodes, strict=True) if node == info.node_rank]
    environ.update(
        RANK=str(ranks_.index(info.rank)), WORLD_SIZE=str(len(ranks_)), LOCAL_RANK=str(local.index(info.rank)),
        MASTER_ADDR=info.master_addr or "127.0.0.1", MASTER_PORT=str(go["port"]), NODES=json.dumps(nodes),
    )  # fmt: skip
    left = end - time.monotonic()
    command = [sys.executable, "-m", "recipes.core.doctor.linkcheck", str(go["backend"]), str(listener), f"{left:.0f}"]
    out, wrong = examine.ask(command, left, environ, (listener,) if listener >= 0 else ())
    found: dict[str, Any] = {"at": "its start", "pairs": []}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            word = json.loads(line)
            found["pairs"] += [word.pop("pair")] if "pair" in word else []
            found.update(word)
    if wrong and "error" not in found and found["at"] != "the end":
        found["error"] = wrong
    return found


def _expected(info: RankInfo) -> verdict.Expected:
    return verdict.Expected(info.nodes or ("",) * info.num_nodes, info.world_size)


def _judge(meeting: Meeting, info: RankInfo, cfg: Config, run_dir: Path, end: float) -> int:
    """Waits for all final reports until ``end``, and says what they come to. Gives the exit status."""
    known = range(0 if info.rank == 0 or meeting.is_heard else 1, info.world_size)  # the first rank's may be old
    finals = meeting.wait([f"final-{rank}" for rank in known], end)
    early = meeting.wait([f"report-{rank}" for rank in known if f"final-{rank}" not in finals], 0)
    found = verdict.judge(
        _expected(info), [*finals.values(), *({**report, "early": True} for report in early.values())]
    )
    write_json(run_dir / "doctor.json", verdict.as_json(found))
    meeting.tell("verdict", {"exclude": found.exclude, "healthy": found.healthy})
    code = errors.EXIT_DONE if found.healthy else errors.EXIT_MACHINE
    worst = next((entry.what for entry in found.entries if entry.bad), "")
    if rundir.job_id(os.environ):
        attempt = rundir.open_attempt(run_dir, found.hosts, rundir.launch_id(os.environ))
        first = {"host": found.exclude[0] if found.exclude else None, "exit_status": code} if code else None
        state, kind = ("failed", Kind.machine) if code else ("done", None)
        rundir.write_status(run_dir, state, attempt=attempt, step=0, reason=worst, kind=kind, first=first)
    print(json.dumps(verdict.as_json(found)) if cfg.json else "\n".join(verdict.lines(found)), flush=True)
    # srun --kill-on-bad-exit would end the others, and its status be theirs, where this rank left before them.
    gone = meeting.wait(
        [f"gone-{name.partition('-')[2]}" for name in finals if name != f"final-{info.rank}"],
        time.monotonic() + LEAVE_S,
    )
    if len(gone) + 1 < info.world_size:
        _end_step()
    meeting.sweep()
    return code


def _end_step() -> None:
    """Has Slurm end this step a moment later: a process that hangs would keep srun waiting for ever."""
    if ranks.in_step(os.environ):  # never the batch script or the shell of salloc, which have an id too
        with contextlib.suppress(OSError):
            step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
            subprocess.Popen(["sh", "-c", 'sleep 1; exec scancel --signal=KILL "$0"', step], start_new_session=True)


def _stand_by(meeting: Meeting, info: RankInfo, cfg: Config, run_dir: Path, deputy: float, end: float) -> int:
    """Serves the others until the verdict is there. Where rank 0 gives none, the first rank that lives does."""
    if not meeting.wait(["verdict"], deputy):
        alive = meeting.wait([f"final-{rank}" for rank in range(1, info.world_size)], 0)
        if min((int(name.partition("-")[2]) for name in alive), default=info.rank) == info.rank:
            return _judge(meeting, info, cfg, run_dir, 0)
        meeting.wait(["verdict"], end)
    with contextlib.suppress(FileNotFoundError):  # swept as soon as it is seen
        meeting.tell(f"gone-{info.rank}", {"rank": info.rank})
    return errors.EXIT_DONE


def main(argv: list[str]) -> int:
    if argv[:1] == ["explain"] and len(argv) > 1:
        errors.show("\n".join(explain.explain([Path(word) for word in argv[1:]], Queue())))
        return errors.EXIT_DONE
    if argv[:1] == ["env"] and len(argv) > 1:
        return check_env_files(argv[1:])
    if argv[:1] == ["network"]:
        return propose(argv[1:])
    if argv and argv[0] in ("explain", "env"):
        raise ConfigError(
            f"{argv[0]}: a path is missing: python -m recipes.doctor {argv[0]} {'FOLDER' if argv[0] == 'explain' else 'FILE'}"
        )
    if any(word in ("-h", "--help") for word in argv):
        errors.show(f"{(__doc__ or '').strip()}\n\n{help.help_text('doctor')}")
        return errors.EXIT_DONE
    keep_all()
    source.go_home(ROOT)
    settings = command_line.parse(["json=true" if word == "--json" else word for word in argv], recipe="doctor")
    info = ranks.detect(os.environ)
    envfile.apply(profiles.env_variables(settings.run.network, settings.job.cluster), os.environ)
    os.umask(int(settings.run.umask, 8))
    # A thread's, since a signal's handler waits for a call that hangs.
    over = threading.Timer(settings.config.seconds + OVER_S, _out_of_time)
    over.daemon = True
    over.start()
    leaving: list[Callable[[], None]] = []
    _end_when_told(leaving)
    return examine_all(settings, info, leaving)


def keep_all() -> None:
    """Without Python's collector, which walks all that the nodes have said again and again: this process is short, and keeps it all."""
    gc.disable()


def check_env_files(files: Sequence[str]) -> int:
    """Prints what is wrong in env files; status 2 where one cannot be used, or sets what cannot work."""
    code = errors.EXIT_DONE
    for file in files:
        try:
            problems = variables.check_file(Path(file), ROOT / "env")
        except envfile.EnvFileError as error:
            print(f"doctor: {error}", file=sys.stderr)
            code = errors.EXIT_CONFIG
            continue
        for problem in problems:
            print(f"{file}: {problem.name}: {problem.what}: {problem.mend}")
            code = errors.EXIT_CONFIG if problem.bad else code
        if not problems:
            print(f"{file}: nothing is wrong with it")
    return code


def propose(words: Sequence[str]) -> int:
    """Prints the lines that one's own env file wants on this node; none is what most want."""
    command_line.parse(words, recipe="doctor")
    info = ranks.detect(os.environ)
    here = examine.Surroundings(os.environ, info, ROOT)
    facts, _ = examine.interfaces(here)
    chosen = facts.get("chosen") or {"interface": "", "address": ""}
    others = facts["interfaces"].get(chosen["interface"], {}).get("addresses", [])
    infiniband = facts["infiniband"]
    print(
        "\n".join(
            variables.suggestion(chosen["interface"], infiniband, chosen["address"], others, bool(chosen["interface"]))
        )
    )
    return errors.EXIT_DONE


def _out_of_time() -> NoReturn:
    print(
        f"doctor: {socket.gethostname()}: was not through in time (seconds=), and gives up", file=sys.stderr, flush=True
    )
    examine.leave()
    os._exit(errors.EXIT_MACHINE)


def _end_when_told(leaving: Sequence[Callable[[], None]]) -> None:
    """Has this process end at once where it is told to, after what ``leaving`` then holds, and leave no other behind.

    A thread does it: Python's handlers are the main thread's, which does not wake up for a signal that came to another one.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def end() -> NoReturn:
        number = ours.recv(1)[0]
        examine.leave()
        for last in leaving:
            last()
        os._exit(128 + number)

    threading.Thread(target=end, name="told to end", daemon=True).start()
    signal.set_wakeup_fd(theirs.detach())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda *_: None)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except (ConfigError, ranks.RankError, envfile.EnvFileError, errors.InputError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        status = errors.EXIT_CONFIG
    except BrokenPipeError:  # whoever read it has seen enough
        status = 128 + signal.SIGPIPE
    except OSError as error:
        print(
            f"doctor: {socket.gethostname()}: {error.filename or ''} {error.strerror or error}: give another run_dir=",
            file=sys.stderr,
        )
        status = errors.EXIT_MACHINE
    examine.leave()
    os._exit(status)  # a check that hangs is not waited for
