"""The cluster side of the course: profiles, jobs, the scripts that are handed in, their check."""
