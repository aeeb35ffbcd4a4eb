"""Adapters of agents that are programs of their own, one module each: how to install and to start them. No SDKs."""
