"""What travels from an agent's sandbox into the verifier's own: data, never anything that would be run or obeyed."""
