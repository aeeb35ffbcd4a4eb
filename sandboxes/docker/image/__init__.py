"""Images: what is sent to build one, what is pulled, what is prepared for a profile. No containers."""
