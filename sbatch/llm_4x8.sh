#!/bin/bash
# Recipe llm on 4 nodes with 8 GPUs each; keys: python -m recipes.llm --help. From the repository's top folder:
#     sbatch [options that override those below] sbatch/llm_4x8.sh [key=value ...]
#SBATCH --job-name=llm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=720
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --output=%x-%j.out

# sbatch/job.sh must belong to you or to root: in a shared folder such as /tmp, another user could have made it.
case $(stat -c %u sbatch sbatch/job.sh 2>&1 | xargs) in
    "0 0" | "$UID $UID") . sbatch/job.sh ;;
    *) echo "llm_4x8.sh: $PWD is not a clone of yours: cd to the top folder of your clone and run sbatch there" >&2; exit 2 ;;
esac
begin llm "$@" # sets step, inside and words for the lines below
while next_step; do
    srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --export=ALL --kill-on-bad-exit=1 --wait=60 --mem=0 "${step[@]}" \
        "${inside[@]}" -u -m recipes.llm "${words[@]}"
    step_ended $?
done
