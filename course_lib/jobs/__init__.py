"""Cluster jobs: profiles of sites, job scripts, their lint, schedulers, submissions, records."""
