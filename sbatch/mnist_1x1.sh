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

# sbatch/job.sh must belong to you or to root: in a shared folder such as /tmp, another user could have made it.
case $(stat -c %u sbatch sbatch/job.sh 2>&1 | xargs) in
    "0 0" | "$UID $UID") . sbatch/job.sh ;;
    *) echo "mnist_1x1.sh: $PWD is not a clone of yours: cd to the top folder of your clone and run sbatch there" >&2; exit 2 ;;
esac
begin mnist "$@" # sets step, inside and words for the lines below
while next_step; do
    srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --export=ALL --kill-on-bad-exit=1 --wait=60 --mem=0 "${step[@]}" \
        "${inside[@]}" -u -m recipes.mnist "${words[@]}"
    step_ended $?
done
