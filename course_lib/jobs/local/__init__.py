"""Run jobs on this machine, with the interface of a scheduler, where there is no Slurm."""
