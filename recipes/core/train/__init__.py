"""What a training recipe needs and what uses torch: process group, run, step loop, checkpoints,
metrics, models. Recipes import it.

How the ranks stop. A signal, or the approaching time limit, sets a flag of one rank
(`run.signals.StopFlag`). `agreement.Agreement`, one sum over all ranks after each step, makes all
ranks stop at the same step; before the first step `World.together` does. `Run.stop_is_near` is a
hint for long loops between two steps: it ends an evaluation early, and the agreement follows.

How a hang ends. Each watcher catches what the others cannot:

- the thread `failure.watch_peers` in each rank: it waits for another rank longer than timeout_s. It
  asks the store which rank is behind, names it, and ends its own rank. torch's timeouts are not
  used, because they also count the time in which a job is suspended.
- the process `run.watchdog` beside each rank: its rank makes no progress at all, because it is
  stopped, in a system call, or in code that holds the interpreter's lock. Then no thread of the
  rank can act.
- `World.together`: work before the first step that may take long (staging data, reading files). It
  ends if it makes no progress.
- `rendezvous.process_group`: ranks that never meet. Until then there is no rank to ask.
- the launcher (srun --kill-on-bad-exit, `launch.local`): a rank that has ended. It ends the other
  ranks.
"""
