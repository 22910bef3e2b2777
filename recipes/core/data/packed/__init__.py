"""Packed copies of image folders: writing, reading, and copying them to a node's local disk."""
