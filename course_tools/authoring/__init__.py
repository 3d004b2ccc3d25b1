"""Build the notebooks of a lesson from its source, and begin an exercise."""
