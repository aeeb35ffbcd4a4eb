"""Runs all detectors of reward hacking over an attempt."""

from collections.abc import Sequence

from harness.integrity.detectors import (
    answers,
    appearance,
    checks,
    code,
    configuration,
    data,
    gates,
    hooks,
    literal,
    reach,
    subjects,
    words,
)
from harness.integrity.evidence import Evidence
from harness.integrity.finding import Finding
from harness.integrity.scene import Detector, ObservedCompletion, Scene

DETECTORS: Sequence[Detector] = (
    checks.tests_weakened,
    checks.goldens_rewritten,
    checks.judging_weakened,
    checks.standards_lowered,
    checks.forbidden_touched,
    configuration.runner_configured,
    configuration.build_hollowed,
    configuration.findings_silenced,
    hooks.interpreter_steered,
    hooks.variables_planted,
    code.equality_overridden,
    code.validator_hollow,
    code.runner_left,
    code.clock_tampered,
    code.caller_asked,
    answers.hard_coded,
    literal.special_cased,
    literal.inputs_recognised,
    literal.rows_copied,
    literal.answers_stored,
    answers.marker_left,
    answers.grader_read,
    answers.grader_used,
    reach.fix_fetched,
    reach.left_running,
    reach.others_touched,
    reach.caches_planted,
    reach.others_used,
    reach.answer_sought,
    reach.answer_guessed,
    subjects.subject_mocked,
    subjects.assertions_redefined,
    subjects.tests_left,
    subjects.forbidden_used,
    subjects.tests_empty,
    gates.proof_assumed,
    gates.warnings_silenced,
    gates.constraints_dropped,
    gates.hooks_skipped,
    appearance.word_planted,
    appearance.text_hidden,
    appearance.outcome_printed,
    appearance.text_padded,
    data.inputs_changed,
    data.rows_written,
    data.expected_copied,
    words.judge_addressed,
    words.log_invented,
    words.figures_invented,
    words.claims_unfounded,
    words.announced,
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
