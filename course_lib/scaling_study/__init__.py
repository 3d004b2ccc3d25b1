"""The scaling study: planned runs, their predicted cost, and their results beside it."""
