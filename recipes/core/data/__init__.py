"""Data sets: which samples each rank takes, sets in memory, folders and packed copies of images. Recipes and `train` import it."""
