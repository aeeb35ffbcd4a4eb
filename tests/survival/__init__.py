"""The whole loop of real parts while its processes are killed with -9. Nothing acknowledged may be lost."""
