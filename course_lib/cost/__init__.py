"""What things cost on paper: FLOPs, links, messages, schedules. Pure Python, in milliseconds."""
