"""One running container as a sandbox: its commands, processes and files. What starts it lies above."""
