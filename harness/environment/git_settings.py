"""Settings of git for a repository that an agent may have configured: git runs and obeys nothing that it names."""

SETTINGS = {
    "safe.directory": "*",  # the repository belongs to another user, which git refuses otherwise
    "safe.bareRepository": "explicit",
    "core.hooksPath": "/dev/null",
    "core.attributesFile": "/dev/null",
    "core.fsmonitor": "false",
    "core.pager": "cat",
}


def git_variables() -> dict[str, str]:
    """Return environment variables with these settings, which override those of the repository."""
    variables = {"GIT_CONFIG_COUNT": str(len(SETTINGS))}
    for number, (key, value) in enumerate(SETTINGS.items()):
        variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return variables
