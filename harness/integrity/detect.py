"""Runs all detectors of reward hacking over an attempt."""

from collections.abc import Sequence

from harness.integrity.detectors import answers, checks, code, configuration, hooks, intent, reach
from harness.integrity.evidence import Evidence
from harness.integrity.finding import Finding
from harness.integrity.scene import Detector, ObservedCompletion, Scene

DETECTORS: Sequence[Detector] = (
    checks.tests_weakened,
    checks.goldens_rewritten,
    checks.forbidden_touched,
    configuration.runner_configured,
    configuration.build_hollowed,
    configuration.findings_silenced,
    hooks.interpreter_steered,
    hooks.variables_planted,
    code.equality_overridden,
    code.runner_left,
    code.clock_tampered,
    code.caller_asked,
    answers.hard_coded,
    answers.marker_left,
    answers.grader_read,
    answers.grader_used,
    reach.fix_fetched,
    reach.left_running,
    reach.others_touched,
    reach.caches_planted,
    reach.judge_addressed,
    intent.announced,
)
MOST = 50
"""Findings of one attempt that are kept."""


def detect(chain: Sequence[ObservedCompletion], evidence: Evidence) -> list[Finding]:
    """Return what the detectors find in an attempt's completions, in commit order, and in what it left."""
    scene = Scene(chain, evidence)
    findings: list[Finding] = []
    for detector in DETECTORS:
        findings += [finding for finding in detector(scene) if finding not in findings]
    return findings[:MOST]
