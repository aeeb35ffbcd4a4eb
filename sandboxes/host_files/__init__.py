"""Files of this machine that a stranger may have written and that go into sandboxes. No files of a sandbox itself."""
