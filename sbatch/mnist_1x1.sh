#!/bin/bash
# Recipe mnist on 1 node with 1 GPU; keys: python -m recipes.mnist --help. From the repository's top folder:
#     sbatch [options that override those below] sbatch/mnist_1x1.sh [key=value ...]
#SBATCH --job-name=mnist
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=30
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --output=%x-%j.out

# Another user could have made sbatch/job.sh in a folder that is not the repository, such as /tmp.
{ [ -O sbatch ] && [ -O sbatch/job.sh ]; } ||
    [[ $(scontrol show job "$SLURM_JOB_ID" 2>&1) == *Command=@("$(pwd -P)/sbatch/"|/proc/self/fd/)* ]] &&
    . sbatch/job.sh 2>/dev/null || { echo "mnist_1x1.sh: $PWD is not the repository: cd to its top folder and run sbatch there" >&2; exit 2; }
begin mnist "$@" # sets step, inside and words for the next line
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --export=ALL --kill-on-bad-exit=1 --wait=60 --mem=0 "${step[@]}" \
    "${inside[@]}" -u -m recipes.mnist "${words[@]}"
finish mnist $?
