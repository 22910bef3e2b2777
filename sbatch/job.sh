# The parts of a batch script before and after its srun line. Scripts source this file; it is not submitted:
#     . sbatch/job.sh; begin RECIPE "$@"
#     while next_step; do srun … "${step[@]}" "${inside[@]}" -u -m recipes.RECIPE "${words[@]}"; step_ended $?; done
# shellcheck shell=bash

# A user may export these options of the shell (SHELLOPTS) or add them to the first line of a script. The job ends by the
# status of its ranks, and not by them.
set +o errexit +o nounset +o noglob +o noclobber +o posix
export -n SHELLOPTS BASHOPTS

stop() { # MESSAGE [STATUS]
    echo "$1" >&2
    exit "${2:-2}"
}

# bash runs a trap only after the foreground command has ended, so srun runs in the background. If only this shell
# receives a signal (--signal=B:USR1@60, scancel --batch), it asks the ranks to save, see `ask_to_save`. This shell does
# not pass on SIGTERM. Slurm sends it to the ranks itself, and an srun that receives SIGTERM ends them before they have
# saved.
srun() {
    # Before bash 5.1, `command srun &` starts srun below a subshell, which the signal would end in place of srun.
    exec srun "$@" &
    ranks=$!
    [ -z "$watched" ] || "$python" -m recipes.core.launch.batch watch "$recipe" "$ranks" &
    watcher=$!
    while
        signalled=''
        wait "$ranks"
        status=$?
        [ -n "$signalled" ]
    do :; done
    ranks=''
    [ -z "$watched" ] || wait "$watcher" # it may still ask the nodes
    return "$status"
}

# ask_to_save SIGNAL: srun passes SIGUSR1 on to the ranks of a recipe. A program of the user might not catch it, so its
# wrappers read a note instead.
ask_to_save() {
    signalled=1
    if [ -n "$program" ]; then
        "$python" -m recipes.core.launch.batch stop "$program" "$1"
    elif [ -n "$ranks" ]; then
        kill -s USR1 "$ranks" 2>/dev/null
    else
        early=$1 # Slurm signals a job of a few minutes at its start
    fi
}
ranks='' signalled='' early='' watched='' again=''
program='' # the recipe that runs a program of the user, while it has an attempt for a note
trap signalled=1 TERM
trap 'ask_to_save USR1' USR1
trap 'ask_to_save USR2' USR2

unset CDPATH "${!SLURM_CPU_BIND@}" "${!SRUN_@}" # set if the job was submitted inside another allocation
# Without these requests, a step has all GPUs of its job. Some may be left over from another allocation, and srun fails if
# two of them differ. Others would give each rank only its own GPU, so that NCCL could not copy directly between GPUs.
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS_PER_GPU
unset SLURM_GPU_BIND SLURM_TRES_BIND SLURM_GRES SLURM_STEP_GRES SLURM_CPUS_PER_GPU
# Options of another srun: a list that puts rank 0 on another node than the first, fewer CPUs, and programs around each rank.
unset SLURM_HOSTFILE SLURM_NO_KILL SLURM_EXCLUSIVE SLURM_EXACT
unset SLURM_PROLOG SLURM_EPILOG SLURM_TASK_PROLOG SLURM_TASK_EPILOG
# A user's profile may set these for srun. In another folder, the ranks would run other code, and their output could miss the log.
unset SLURM_WORKING_DIR SLURM_TIMELIMIT SLURM_STDOUTMODE SLURM_STDERRMODE SLURM_STDINMODE
unset PYTHONSAFEPATH                            # python -m must import from the working directory: the job's code
export PYTHONUTF8=1                             # paths are UTF-8 in every locale
# Slurm's default gives neighbouring ranks CPUs of different sockets, but neighbouring GPUs are on the same socket.
export SLURM_DISTRIBUTION="${SLURM_DISTRIBUTION-block:block}"

load() { # MODULE...
    type module >/dev/null 2>&1 || . /etc/profile # other login shells, such as csh, do not read this file
    type module >/dev/null 2>&1 || stop "cluster=$RECIPES_CLUSTER: $(hostname) has no command 'module'"
    for module; do
        module load "$module" || stop "cluster=$RECIPES_CLUSTER: module load $module failed on $(hostname)"
    done
}

# has_list PATH: whether it has an access control list. The bits of its group are then the most that the list allows.
has_list() {
    case $(ls -ld "$1") in ??????????+*) ;; *) false ;; esac
}

# require_own FOLDER REPOSITORY: stops if another user can change the code in it, as trust.who_else_can_change of recipes/core does
require_own() {
    local at user mode group name by owner shared repository place problem=''
    repository=$(readlink -f "$2")
    read -r owner mode shared < <(stat -c '%u 0%a %g' "$repository")
    if [ $((mode & 16)) = 0 ] || has_list "$repository"; then shared=0; fi # else this group can change all of the code
    place=$(readlink -f "$1")
    at=$place
    while
        read -r user mode group name < <(stat -c '%u 0%a %g %G' "$at")
        by=2 # others; the user's own group and root's are trusted
        case $group:$name in 0:* | "$shared":* | *:"$(id -un)") ;; *) [ "${RECIPES_TRUST_GROUP:-}" = 1 ] || by=18 ;; esac
        ! has_list "$at" || by=18
        [ "$user" = "$(id -u)" ] || [ "$user" = 0 ] || [ "$user" = "$owner" ] || stop "$at belongs to another user: use a clone and files of your own" 3
        [ "$at" = "$place" ] || [ $((mode & 9)) != 0 ] || problem='' # nobody else can enter it, but perhaps exchange it
        [ $((mode & by)) = 0 ] || [ $((mode & 512)) != 0 ] || problem=${problem:-$at}
        [ "$at" != / ] && [ "$at" != "$repository" ]
    do at=$(dirname "$at"); done
    [ -z "$problem" ] || stop "$problem: others can write to it: run chmod go-w on it, or export RECIPES_TRUST_GROUP=1 if only its group can write, without an access control list" 3
}

# begin RECIPE WORD...: sets up the environment and the snapshot of the code, and checks the keys.
# Sets words, step and inside for the script.
begin() {
    local repository=$PWD code=${RECIPES_CODE:-} had word dashes=''
    recipe=$1
    shift
    # A job of launch.py, or one that is requeued, already has its snapshot of the code. A later edit of this file does not affect it.
    # The first start has made the link, in place of one that came with a copied folder runs/.
    had=$PWD/runs/code/job-${SLURM_JOB_ID:-}
    if [ "${SLURM_RESTART_COUNT:-0}" != 0 ] && [ "${RECIPES_SNAPSHOT:-}" != false ] && [ -L "$had" ] && [ -d "$had" ]; then
        require_own "${had%/*}" "$repository" # else another user chooses which folder it is
        code=$had
    fi
    if [ -d "$code" ]; then
        code=$(readlink -f "$code")
        require_own "$code" "$repository"
        [ -f "$code/sbatch/job.sh" ] || stop "$code is incomplete: submit the job again with the same run_dir=" 3
        if [ ! "${BASH_SOURCE[0]}" -ef "$code/sbatch/job.sh" ]; then
            . "$code/sbatch/job.sh" || exit
            begin "$recipe" "$@"
            return
        fi
        cd "$code" || exit
    fi
    [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || printf '\f\n' # separates the starts of a job in its log
    [ -f "recipes/$recipe.py" ] || stop "$PWD is not the repository: cd to its top folder and submit from there"
    unset RECIPES_CODE
    words=()
    for word; do
        [ "$word" != -- ] || dashes=-- # the arguments after -- are for the user's program
        case $dashes$word in
            cluster=*) export RECIPES_CLUSTER="${word#cluster=}" ;;
            *) words+=("$word") ;;
        esac
    done
    site
    find_python "$repository"
    local absolute=()
    step=() inside=() again=1
    follow begin "$recipe" "$0" "${words[@]}" || exit
    words=("${absolute[@]}")
    # env -C fails on a node that does not see the folder. srun would start the rank in /tmp, where others may put modules.
    [ ${#inside[@]} != 0 ] || inside=(env -C "$PWD" "$python")
}

# follow STEP WORD...: runs a step of launch/batch.py, does what it says, and returns its status. It says pairs of a verb and a
# value, each ended by NUL, on a separate file descriptor, since on some sites Python prints other lines to stdout.
follow() {
    local verb value status=1
    while IFS= read -r -d '' verb && IFS= read -r -d '' value; do
        case $verb in
            again) again=$value step=() ;; # the ranks start again, with other options of srun
            cd) cd "$value" || exit ;; # the folder of the snapshot
            export) export "${value?}" ;;
            inside) inside+=("$value") ;;
            program) program=$value ;;
            status) status=$value ;;
            step) step+=("$value") ;;
            unset) unset "$value" ;;
            watched) watched=$value ;;
            word) absolute+=("$value") ;; # an argument, with absolute paths
        esac
    done < <("$python" -m recipes.core.launch.batch "$@" 3>&1 >&4; printf 'status\0%s\0' $?)
    [ -z "$program" ] || [ -z "$early" ] || ask_to_save "$early"
    return "$status"
} 4>&1

# next_step: whether the ranks are to be started
next_step() {
    [ -n "$again" ] || return
    again='' # else a script that does not call step_ended would start them without end
}

# step_ended STATUS: starts the ranks again with restarts=, requeues a job that was stopped, or returns the exit status of the run
step_ended() {
    require_python "$1"
    program='' early='' # a signal that comes now is for the attempt that follows
    follow step-ended "$recipe" "$1"
}

# examine RECIPE RESUBMITS: runs the doctor before the ranks start. Requeues or ends the job if a node is bad.
examine() {
    "$python" -m recipes.core.launch.batch examine "$1" "$2" || exit
}

require_python() { # STATUS
    [ -x "$python" ] || stop "$recipe: ended with status $1 and is not requeued, since $python no longer exists: install it again, then submit with the same run_dir=" "$1"
}

# finish RECIPE STATUS: step_ended for scripts without a loop, which do not start the ranks again
finish() {
    require_python "$2"
    "$python" -m recipes.core.launch.batch finish "$1" "$2"
}

# site: loads the modules of the site's profile, and sets environment to the profile's Python environment.
site() {
    environment=''
    [ -n "${RECIPES_CLUSTER:-}" ] || return 0
    [ -z "${RECIPES_CLUSTER//[A-Za-z0-9_-]/}" ] || stop "cluster=: must be letters, digits, _ and - only"
    local profile=env/clusters/$RECIPES_CLUSTER.yaml module
    [ -f "$profile" ] || stop "cluster=$RECIPES_CLUSTER: there is no $profile"
    case $(readlink -f "$profile") in "$(readlink -f .)"/*) ;; *) require_own "$profile" . ;; esac # it may be a link
    while read -r module || [ -n "$module" ]; do # the last line may have no newline
        load "$module"
    done < <(sed -n '/^modules:/,/^[a-z_]*:/{s/ *#.*//;s/[[:space:]]*$//;s/^ *- *//p}' "$profile")
    environment=$(sed -n 's/ *#.*//;s/[[:space:]]*$//;s/^environment: *//p' "$profile")
}

with_torch() { # COMMAND: prints the path of this Python if it has torch
    "$1" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null && command -v "$1"
}

# find_python REPOSITORY [PYTHON]: sets python to launch.py's choice, else that of the active environment, else the profile's,
# else PYTHON, else .venv, else conda's base, else one on the PATH that has torch.
find_python() {
    local conda=${CONDA_PREFIX:-} active
    [ "${CONDA_DEFAULT_ENV:-}" != base ] || conda='' # conda activates base in every shell of its users, so base comes last
    active=${VIRTUAL_ENV:-$conda}
    case :$PATH: in *":$conda/bin:"*"${VIRTUAL_ENV:-}/bin:"*) active=${conda:-$active} ;; esac # the one that was activated later
    if [ -n "$active" ] && [ -n "$environment" ] && [ ! "$active" -ef "$environment" ]; then
        echo "the active environment $active is used, not that of cluster=${RECIPES_CLUSTER:-} (environment: $environment)" >&2
    fi
    active=${active:-$environment}
    python=${RECIPES_PYTHON:-${active:+$active/bin/python}}
    python=${python:-${2:-}}
    [ -n "$python" ] || [ ! -x "$1/.venv/bin/python" ] || python=$1/.venv/bin/python
    python=${python:-${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}}
    if [ -z "$python" ] && ! python=$(with_torch python || with_torch python3); then
        [ "${SLURM_EXPORT_ENV:-ALL}" = ALL ] ||
            stop "no Python environment: --export=$SLURM_EXPORT_ENV or SBATCH_EXPORT hides the active one from the job: submit with --export=ALL, or make one here with: make install"
        stop "no Python environment: activate yours, or make one here with: make install"
    fi
    [ -x "$python" ] || stop "there is no $python on $(hostname): install the environment in a folder that all nodes can read" 3
    unset RECIPES_PYTHON
    export PATH="${python%/*}:$PATH" # takes precedence over folders that modules add to PATH
}
