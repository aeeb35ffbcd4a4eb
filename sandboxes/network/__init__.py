"""How a sandbox without a network reaches the proxy: forwarder and relay."""
