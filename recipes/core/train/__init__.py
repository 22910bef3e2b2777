"""What a training recipe needs and what uses torch: process group, run, step loop, checkpoints, metrics, models. Recipes import it."""
