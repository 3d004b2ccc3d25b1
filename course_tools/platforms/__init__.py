"""What other platforms take: autograders, starter repositories, notebooks and tables of grades."""
