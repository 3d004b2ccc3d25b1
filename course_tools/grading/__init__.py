"""Grade the submissions of a class: each one runs in a sandbox, and is judged outside of it."""
