"""What serves `python -m course_lib.train`: its settings, strategies, loop, state, ranks."""
