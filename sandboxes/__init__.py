"""Where agents run: Docker containers, bubblewrap or plain processes behind one interface. No agents, no verdicts."""
