"""Distributed training of language models: built by hand, broken on purpose, measured.

The lessons are the flat files of this package, one idea a file. Everything that serves them lives
in a room of its own: `core` (words), `cost` (paper), `ranks` (wires), `display` (pictures),
`checks` (what the exercises call).
"""
