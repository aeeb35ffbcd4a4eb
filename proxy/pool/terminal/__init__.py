"""What commands of all packages share at a terminal: version, completion, errors, progress. No command lives here."""
