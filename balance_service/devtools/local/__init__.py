"""A real broker and a real registry on this machine, as child processes."""
