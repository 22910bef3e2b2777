#!/bin/bash
# The recipe cifar on 1 node with 8 GPUs. From the repository's top folder:
#     sbatch [options of sbatch] sbatch/cifar_1x8.sh [key=value ...]
# sbatch's options win over the ones below, one by one; the keys: python -m recipes.cifar --help
# Made by: make sbatch (recipes/core/launch/scripts.py). Change it there.
#SBATCH --job-name=cifar
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --output=%x-%j.out

stop() {
    echo "$1" >&2
    exit "${2:-2}"
}
srun() { # a signal to this shell alone (--signal=B:USR1@60, scancel --batch) reaches the ranks, which save
    command srun "$@" &
    ranks=$!
    while
        signalled=''
        wait "$ranks"
        status=$?
        [ -n "$signalled" ]
    do :; done
    ranks=''
    return "$status"
}
ranks='' signalled=''
trap signalled=1 TERM
trap 'signalled=1; [ -z "$ranks" ] || kill -s USR1 "$ranks" 2>/dev/null' USR1 USR2
unset CDPATH "${!SLURM_CPU_BIND@}" "${!SRUN_@}" # left over where this was submitted inside another allocation
unset PYTHONSAFEPATH # python -m imports from the working directory, the code of this job, before anything else
export PYTHONUTF8=1 # paths are UTF-8, whatever the locale is
export RECIPES_BATCH=1 # the job's run directory is one, whatever steps come before the recipe's
[ -f recipes/cifar.py ] ||
    stop "sbatch/cifar_1x8.sh: $PWD is not the repository: cd to its top folder and type sbatch sbatch/cifar_1x8.sh"
environment=''
repository=$PWD code=${RECIPES_CODE:-}
had=$PWD/runs/code/job-${SLURM_JOB_ID:-}
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || [ ! -d "$had" ] || code=$had
[ ! -d "$code" ] || cd "$code" || exit
unset RECIPES_CODE
export RECIPES_SOURCE=$PWD # where Python has to import the recipe from
load() {
    type module >/dev/null 2>&1 || . /etc/profile # not there where the login shell is none of sh's kin
    type module >/dev/null 2>&1 || stop "cluster=$RECIPES_CLUSTER: $(hostname) has no command module"
    for module; do
        module load "$module" || stop "cluster=$RECIPES_CLUSTER: module load $module failed on $(hostname)"
    done
}
words=()
for word in "$@"; do
    case $word in
        cluster=*) export RECIPES_CLUSTER="${word#cluster=}" ;;
        *) words+=("$word") ;;
    esac
done
set -- "${words[@]}"
if [ -n "${RECIPES_CLUSTER:-}" ]; then
    [ -z "${RECIPES_CLUSTER//[A-Za-z0-9_-]/}" ] || stop "cluster=: wants letters, digits, _ and - only"
    profile=env/clusters/$RECIPES_CLUSTER.yaml
    [ -f "$profile" ] || stop "cluster=$RECIPES_CLUSTER: there is no $profile"
    while read -r module || [ -n "$module" ]; do # the last line may lack its end
        load "$module"
    done < <(sed -n '/^modules:/,/^[a-z_]*:/{s/ *#.*//;s/^ *- *//p}' "$profile")
    environment=$(sed -n 's/ *#.*//;s/ *$//;s/^environment: *//p' "$profile")
fi
conda=${CONDA_PREFIX:-}
[ "${CONDA_DEFAULT_ENV:-}" != base ] || conda='' # conda activates base in each of its users' shells: base comes last
active=${VIRTUAL_ENV:-$conda}
case :$PATH: in *":$conda/bin:"*"${VIRTUAL_ENV:-}/bin:"*) active=${conda:-$active} ;; esac # activated later
if [ -n "$active" ] && [ -n "${environment:-}" ] && [ ! "$active" -ef "$environment" ]; then
    echo "the active environment $active is used, not environment: $environment of cluster=${RECIPES_CLUSTER:-}" >&2
fi
active=${active:-${environment:-}}
[ -n "$active" ] || [ -x "$repository/.venv/bin/python" ] || active=${CONDA_PREFIX:-}
if [ -n "$active" ]; then
    python=$active/bin/python
    [ -x "$python" ] || stop "there is no $python on $(hostname): make that environment where all nodes see it" 3
    export PATH="${python%/*}:$PATH" # ahead of what modules have put there
elif [ -x "$repository/.venv/bin/python" ]; then
    python=$repository/.venv/bin/python
else
    stop "no Python environment: activate yours before sbatch, or make one here with: make install"
fi
lines=$(RECIPES_SCRIPT="$0" RECIPES_LINES=3 "$python" -m recipes.core.launch.batch begin cifar "$@" 3>&1 >&2) || exit
step=() inside=("$python")
eval "$lines" # into a copy of the code, with whole paths
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --export=ALL --kill-on-bad-exit=1 --wait=60 --mem=0 "${step[@]}" \
    "${inside[@]}" -u -m recipes.cifar "$@"
"$python" -m recipes.core.launch.batch finish cifar $? "$@"
