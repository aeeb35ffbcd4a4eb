"""How a sandbox without a network reaches the proxy: forwarder and relay. Docker's networks are in sandboxes/docker."""
