"""What a training recipe uses, with torch: process group, run, step loop, checkpoints, metrics, models. Recipes import it."""
