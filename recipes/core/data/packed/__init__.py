"""Packed copies of image folders: a few large files in place of millions of small ones.

`format` describes the files and reads index.json. `write` packs. `read` serves samples to a loader. `stage` copies to a
node's own disk. All but `read` work without torch. Only `recipes.core.data` and `recipes.prepare` import this package.
"""
