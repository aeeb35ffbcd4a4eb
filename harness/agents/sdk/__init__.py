"""Agents made with SDKs: a small program of ours gives the SDK's loop a shell. No programs of others."""
