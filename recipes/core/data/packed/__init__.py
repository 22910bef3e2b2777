"""Packed copies of image folders: a few large files in place of millions of small ones."""
