"""From settings to processes: the job and its script, submission, ranks on this machine, the batch shell's steps. Recipes do not import it."""
